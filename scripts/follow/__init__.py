"""Follow one DAG run from outside: what Airflow's API and the run store say, as a live view and a last table."""
