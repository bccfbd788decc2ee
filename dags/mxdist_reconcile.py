"""Every ten minutes, end jobs that nobody wants any more, and tell MLflow what it missed.

Airflow tells a waiting task of its end through a living triggerer only. So a DAG run that is deleted while none lives,
or in the moment before one has taken the task over, would leave its job running. This DAG finds such jobs and ends
them; it also completes and closes runs in MLflow that were left open while MLflow was away. One such DAG serves all
DAGs of this Airflow that share a run store. It leaves everything alone that another Airflow asked for.
"""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG, CronTriggerTimetable

from mxdist.operators.reconcile import ReconcileJobsOperator

with DAG(
    "mxdist_reconcile",
    doc_md=__doc__,
    schedule=CronTriggerTimetable("*/10 * * * *", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    tags=["mxdist"],
):
    ReconcileJobsOperator(task_id="reconcile")
