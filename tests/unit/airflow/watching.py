"""Triggers that watch one attempt, quickly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mxdist.store import Attempt
from mxdist.triggers.job import JobTrigger


def trigger_of(attempt: Attempt, runs_uri: str, **more: Any) -> JobTrigger:
    fields = {"poll_s": 0.01, "stale_after_s": 60.0, **more}
    return JobTrigger(
        mxdist_conn_id="mxdist_default",
        runs_uri=runs_uri,
        job_key=attempt.claim.job_key,
        attempt=attempt.number,
        **fields,
    )


def waiting_for_a_task(attempt: Attempt, runs_uri: str) -> JobTrigger:
    trigger = trigger_of(attempt, runs_uri)
    trigger._task_instance = SimpleNamespace(dag_id="dag", task_id="task", run_id="run", map_index=-1)
    return trigger
