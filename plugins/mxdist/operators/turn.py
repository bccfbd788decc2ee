"""A training takes its DAG run's turn for the registered model, or waits for it: see ``tracking/turns.py``."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException

from mxdist.errors import Problem, SpecError
from mxdist.operators.life import LIFE, life_of
from mxdist.store import JobRun

if TYPE_CHECKING:
    from airflow.sdk import Context

    from mxdist.launch.client import JobClient
    from mxdist.tracking.turns import Party

WAIT, SKIP, TRAIN = "wait", "skip", "train"


def check_policy(policy: str) -> None:
    """Refuse what is no policy.

    :raises SpecError: naming those that there are.
    """
    if policy not in (WAIT, SKIP, TRAIN):
        raise SpecError("The task", [Problem("out_of_turn", f"must be {WAIT}, {SKIP} or {TRAIN}, not {policy!r}")])


def take_turn(task: Any, context: Context, client: JobClient, key: str, *, model: str, policy: str) -> None:
    """Return when the DAG run has the turn; else defer the task, or skip it. A job that runs already needs no turn."""
    from mxdist.tracking.turns import Turns
    from mxdist.triggers.asking import about_turns

    if policy == TRAIN or _runs_already(client, key, life_of(context)):
        return
    me = party_of(context, key)
    blocker = Turns(client.runs, model).take(me, about_turns(client.runs, me.airflow), wait=policy == WAIT)
    if blocker is None:
        return
    if policy == SKIP:
        raise AirflowSkipException(f"{blocker} trains {model} now, and its turn is not over.")
    task.log.info("Waiting to train %s: %s goes first.", model, blocker)
    from mxdist.triggers.turn import TurnTrigger

    trigger = TurnTrigger(
        mxdist_conn_id=task.mxdist_conn_id, runs_uri=client.runs.uri, model=model, party=asdict(me), poll_s=task.poll_s
    )
    task.defer(trigger=trigger, method_name="execute_in_turn")


def party_of(context: Context, key: str) -> Party:
    """Return the task as one that wants the turn."""
    from mxdist.operators.stage import data_as_of
    from mxdist.reconcile import AIRFLOW_ID, airflow_of
    from mxdist.tracking.turns import Party

    task, as_of = context["ti"], data_as_of(context)
    return Party(
        airflow=airflow_of(task.log_url, os.environ.get(AIRFLOW_ID)),
        dag_id=task.dag_id,
        run_id=task.run_id,
        task_id=task.task_id,
        map_index=-1 if task.map_index is None else task.map_index,
        as_of=as_of.astimezone(UTC).isoformat(timespec="seconds") if as_of else "",
        job_key=key,
    )


def _runs_already(client: JobClient, key: str, life: str) -> bool:
    latest = JobRun(client.runs, key).latest()
    return (
        latest is not None
        and latest.claim.source.get(LIFE) == life
        and latest.result() is None
        and latest.cancel_intent() is None
    )
