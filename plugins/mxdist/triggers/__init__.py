"""What waits for a job while its Airflow task sleeps."""
