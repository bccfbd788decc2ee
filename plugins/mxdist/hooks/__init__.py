"""From Airflow connections to stores, launchers and MLflow."""
