"""Fixtures for every test; the services among them start when the first test asks for them."""

from __future__ import annotations

from support.airflow_stack import airflow_stack
from support.mlflow_server import mlflow_server, mlflow_session, secured_mlflow
from support.seaweed import bucket, seaweed

__all__ = ["airflow_stack", "bucket", "mlflow_server", "mlflow_session", "seaweed", "secured_mlflow"]
