"""mxdist: distributed MXNet training, scheduled by Airflow, kept in S3, recorded in MLflow."""

__version__ = "0.1.0"
