"""What `dags/mxdist_reconcile.py` does every ten minutes, whenever a test wants it."""

from __future__ import annotations

from airflow.sdk import DAG

from mxdist.operators.reconcile import ReconcileJobsOperator

with DAG("reconcile", schedule=None):
    ReconcileJobsOperator(task_id="reconcile")
