"""The services around mxdist as real processes on loopback: SeaweedFS, MLflow and Airflow."""
