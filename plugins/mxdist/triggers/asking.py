"""What a task or a trigger may ask Airflow about other runs, through the Task SDK."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxdist.store import Store
    from mxdist.tracking.turns import Asked, Party

log = logging.getLogger(__name__)

_GOES_ON = {None, "running", "deferred", "up_for_retry", "up_for_reschedule", "scheduled", "queued"}
_UNSEEN_S = 3600.0  # from the turn of another Airflow's task to its submission


def task_state(dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
    """Return the state of a task instance; None when it has none yet, or is not there.

    :raises Exception: of any kind: Airflow did not answer.
    """
    return next(iter(_states(dag_id, run_id, task_id, map_index)), None)


def _states(dag_id: str, run_id: str, task_id: str, map_index: int) -> list[str | None]:
    """Return the state of a task instance; nothing when it is not there."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=map_index
    )
    name = task_id if map_index < 0 else f"{task_id}_{map_index}"
    found = states.get(run_id, {})
    return [None if found[name] is None else _text(found[name])] if name in found else []


def ended_by_somebody(task: Any) -> bool:
    """Return whether a task instance is over, cleared or deleted; not if it only lost, or is about to lose, its worker.

    One that Airflow takes from a lost scheduler has no state until it is scheduled anew.

    If Airflow does not answer, it is not: whoever marks a task also reaches its job by other ways (``listeners.py``
    and ``ReconcileJobsOperator``), and a job that is ended for nothing has lost hours.
    """
    map_index = -1 if task.map_index is None else task.map_index
    try:
        states = _states(task.dag_id, task.run_id, task.task_id, map_index)
    except Exception as error:  # of any kind: what tells it may just be ending
        log.warning("Cannot ask for the task's state: %s", str(error) or type(error).__name__)
        return False
    return not states or states[0] not in _GOES_ON


def run_state(dag_id: str, run_id: str) -> str | None:
    """Return the state of a DAG run; None when there is no such run.

    :raises Exception: of any kind: Airflow did not answer.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    if not RuntimeTaskInstance.get_dr_count(dag_id=dag_id, run_ids=[run_id]):
        return None
    return _text(RuntimeTaskInstance.get_dagrun_state(dag_id=dag_id, run_id=run_id))


def about_turns(runs: Store, airflow: str) -> Asked:
    """Return how to find out whether others still have, or wait for, the turn to train a model.

    Another Airflow cannot be asked. Its run has the turn until the training that took it is over, and nobody waits
    for those that wait there.

    :param airflow: the Airflow that can be asked.
    """
    from mxdist.reconcile import PARENT_STATUS, TASK_ACTIVE
    from mxdist.tracking.turns import Asked

    def run_is_over(party: Party) -> bool:
        state = run_state(party.dag_id, party.run_id)
        return state is None or state in PARENT_STATUS

    def over(party: Party) -> bool:
        if party.airflow != airflow:
            return _trained(runs, party)
        try:
            return run_is_over(party)
        except Exception as error:
            log.warning("Airflow does not say whether %s is over: %s", party, error)
            return False

    def gone(party: Party) -> bool:
        if party.airflow != airflow:
            return True
        try:
            name = (party.dag_id, party.run_id, party.task_id, party.map_index)
            return run_is_over(party) or task_state(*name) not in TASK_ACTIVE
        except Exception as error:
            log.warning("Airflow does not say whether %s waits: %s", party, error)
            return False

    return Asked(over, gone)


def _trained(runs: Store, party: Party) -> bool:
    from mxdist.store import JobRun

    attempt = JobRun(runs, party.job_key).latest()
    if attempt is None or attempt.claim.submitted_at < party.at:
        return time.time() - party.at > _UNSEEN_S
    return attempt.result() is not None


def _text(state: object) -> str:
    return str(getattr(state, "value", state))
