"""Which task asks for a job, and whether it is a retry of the one that asked before or was cleared in between.

Airflow keeps a retry and a clear apart in two numbers: a clear raises ``max_tries`` of the task, and gives a run that
had ended a new start date. Neither changes between retries. Both stand in the claim of every attempt.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk import Context

LIFE = "life"
"""The key of a claim's source that tells a retry (same value) from a clear (another)."""


def life_of(context: Context) -> str:
    """Return what stays the same over the retries of a task and changes when it is cleared."""
    start = context["dag_run"].start_date
    return f"{start.isoformat() if start else ''}/{context['ti'].max_tries}"


def parent_of(context: Context) -> str:
    """Return the key of the MLflow parent run that all jobs of a DAG run share."""
    task = context["ti"]
    return f"{task.dag_id}/{task.run_id}"


def job_key_of(context: Context) -> str:
    """Return the key of the task's job: the same for every try, another for every map index."""
    from mxdist.launch.client import job_key_for_airflow

    task = context["ti"]
    map_index = -1 if task.map_index is None else task.map_index
    return job_key_for_airflow(task.dag_id, task.run_id, task.task_id, map_index)


def source_of(context: Context) -> dict[str, str]:
    """Return who asks: what the claim and the MLflow tags say of it."""
    from mxdist.reconcile import AIRFLOW, AIRFLOW_ID

    task = context["ti"]
    return {
        "dag_id": task.dag_id,
        "run_id": task.run_id,
        "task_id": task.task_id,
        "map_index": str(-1 if task.map_index is None else task.map_index),
        "try": str(task.try_number),
        "url": task.log_url,
        LIFE: life_of(context),
        **({AIRFLOW: name} if (name := os.environ.get(AIRFLOW_ID)) else {}),
    }
