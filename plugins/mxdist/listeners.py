"""What happens when a DAG run ends, or somebody marks a task by hand.

Airflow calls these in the scheduler and in the API server, which must never wait for S3 or MLflow. So a call only puts
a note into a queue; one background thread does the work, with bounds. What fails there is logged, and put right by
``ReconcileJobsOperator``.

Nothing is asked of the DAG's code: the tasks told Airflow where their job is (see ``operators/base.py``).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow.listeners import hookimpl

from mxdist.barriers import reach
from mxdist.forks import ThreadLock, no_fork

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
    from sqlalchemy.orm import Session

    from mxdist.store import Attempt

log = logging.getLogger(__name__)

_JOB = "mxdist_job"  # operators/base.py, which is not imported here: this module must load fast
_MARK = "patch_task_instance"  # names of events in Airflow's audit log
_MARKS_OF_A_RUN = ("patch_task_group_instances", "patch_dag_run")
_MARKS_OF_MANY = ("bulk_task_instances", "bulk_dag_runs")
_WAITING_AT_MOST = 200
_EXIT_WAIT_S = 20.0
_TRIES = 3
_PAUSE_S = 2.0
_QUEUEING = ThreadLock()


@dataclass(frozen=True)
class Note:
    """Something that ended.

    :param task_id: only this task; None: the whole DAG run.
    :param mark: as what that task was marked by hand.
    :param at: when, in Unix seconds: a job that was submitted later is another life's.
    """

    dag_id: str
    run_id: str
    succeeded: bool
    task_id: str | None = None
    map_index: int = -1
    mark: str | None = field(default=None, compare=False)
    at: float = field(default_factory=time.time, compare=False)


@hookimpl
def on_dag_run_success(dag_run: DagRun, msg: str) -> None:
    """Close the MLflow parent run, end jobs that nobody waits for."""
    _remember(Note(dag_run.dag_id, dag_run.run_id, succeeded=True))


@hookimpl
def on_dag_run_failed(dag_run: DagRun, msg: str) -> None:
    """Close the MLflow parent run, end jobs that nobody waits for."""
    _remember(Note(dag_run.dag_id, dag_run.run_id, succeeded=False))


@hookimpl
def on_task_instance_success(previous_state: Any, task_instance: RuntimeTaskInstance) -> None:
    """End the job of a task that was marked as success while it waited for it."""
    _marked(previous_state, task_instance, "success")


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: RuntimeTaskInstance, error: Any) -> None:
    """End the job of a task that was marked as failed while it waited for it."""
    _marked(previous_state, task_instance, "failed")


@hookimpl
def on_task_instance_skipped(previous_state: Any, task_instance: RuntimeTaskInstance) -> None:
    """End the job of a task that was marked as skipped while it waited for it."""
    _marked(previous_state, task_instance, "skipped")


def _marked(previous_state: Any, task_instance: Any, mark: str) -> None:
    # Only the API server, where people mark tasks, calls without a previous state. A task that ends by itself, or whose
    # worker was lost, keeps its job: its next try wants it.
    if previous_state is None:
        task = task_instance
        _remember(Note(task.dag_id, task.run_id, mark == "success", task.task_id, task.map_index, mark))


class Background:
    """One daemon thread that works through notes; made again in a forked process."""

    def __init__(self) -> None:
        self._pid = 0
        self._notes: queue.Queue[Note] = queue.Queue(_WAITING_AT_MOST)

    def put(self, note: Note) -> None:
        """Take a note, or drop it when far too many wait."""
        with _QUEUEING.held():
            if self._pid != os.getpid():
                self._pid, self._notes = os.getpid(), queue.Queue(_WAITING_AT_MOST)
                threading.Thread(target=self._work, args=(self._notes,), name="mxdist-listener", daemon=True).start()
        try:
            self._notes.put_nowait(note)
        except queue.Full:
            log.warning("Too many ended DAG runs wait for MLflow; %s is left to ReconcileJobsOperator.", note)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every note is worked through; return whether it is."""
        if self._pid != os.getpid():
            return True
        give_up = time.monotonic() + timeout_s
        while self._notes.unfinished_tasks and time.monotonic() < give_up:
            time.sleep(0.05)
        return not self._notes.unfinished_tasks

    def _work(self, notes: queue.Queue[Note]) -> None:
        _load()
        while True:
            note = notes.get()
            try:
                settle(note)
            except Exception:
                log.exception("Cannot settle %s; it is left to ReconcileJobsOperator.", note)
            finally:
                notes.task_done()


def _load() -> None:
    """Import what settling needs while nothing forks: the scheduler forks workers at any time."""
    try:
        with no_fork():
            import mxdist.hooks.cluster
            import mxdist.hooks.mlflow
            import mxdist.store.s3
            import mxdist.tracking.replay
            import mxdist.tracking.runs  # noqa: F401
    except Exception:
        log.exception("Cannot load what settles ended runs; they are left to ReconcileJobsOperator.")


_BACKGROUND = Background()
atexit.register(_BACKGROUND.drain, _EXIT_WAIT_S)


def _remember(note: Note) -> None:
    try:
        _BACKGROUND.put(note)
    except Exception:
        log.exception("Cannot note %s; it is left to ReconcileJobsOperator.", note)


def settle(note: Note) -> None:
    """End jobs that nobody waits for any more; close the parent run when the whole DAG run is over."""
    places = places_of(note)
    for place in places:
        _bounded(_end_job, place, note)
    parents = {(place["mlflow_conn_id"], place["parent"]) for place in places if place.get("mlflow_conn_id")}
    if note.task_id is None:
        for conn_id, parent in sorted(parents):
            _bounded(_close_parent, conn_id, parent, note.succeeded)


def places_of(note: Note) -> list[dict[str, Any]]:
    """Return where the jobs of the note's tasks are, as those tasks said before they submitted."""
    from airflow.utils.session import create_session

    with create_session() as session:
        return _places(session, note)


def _places(session: Session, note: Note) -> list[dict[str, Any]]:
    """Return what tasks said: to the state store, which outlives retries, or as an XCom, which each try begins anew."""
    from airflow.models.task_state_store import TaskStateStoreModel
    from airflow.models.xcom import XComModel

    found: dict[str, dict[str, Any]] = {}
    for said in (XComModel, TaskStateStoreModel):
        for value, state, next_method, by_hand in session.execute(_said(said, note)):
            place = value
            while isinstance(place, str):  # an XCom is JSON in JSON
                place = json.loads(place)
            if "job_key" in place:  # else it lies in a state store of the user's own
                found[place["job_key"]] = {**place, "marked": marked(state, next_method, by_hand)}
    return list(found.values())


def _said(table: Any, note: Note) -> Any:
    """Return the query for what tasks said in a table, and what became of them."""
    from airflow.models.taskinstance import TaskInstance as Task
    from sqlalchemy import and_, select

    same = [getattr(Task, name) == getattr(table, name) for name in ("dag_id", "run_id", "task_id", "map_index")]
    query = select(table.value, Task.state, Task.next_method, _touched_by_hand(table)).outerjoin(Task, and_(*same))
    query = query.where(table.dag_id == note.dag_id, table.run_id == note.run_id, table.key == _JOB)
    if note.task_id is not None:
        query = query.where(table.task_id == note.task_id, table.map_index == note.map_index)
    return query


def _touched_by_hand(table: Any) -> Any:
    """Return the question whether Airflow's audit log, written before the deed, tells of a mark since the task began.

    A request for many runs names them in its body; one for a task may take other tasks along.
    """
    from airflow.models.log import Log
    from airflow.models.taskinstance import TaskInstance as Task
    from sqlalchemy import and_, exists, or_

    this_task = or_(Log.task_id == table.task_id, Log.extra.regexp_match('"include_[a-z]+": true'))
    one = or_(and_(Log.event == _MARK, this_task), Log.event.in_(_MARKS_OF_A_RUN))
    of_this_run = and_(Log.dag_id == table.dag_id, Log.run_id == table.run_id, one)
    of_many = and_(Log.event.in_(_MARKS_OF_MANY), Log.extra.contains(table.run_id))
    sets_a_state = Log.extra.contains('state": "')  # a request may also only leave a note
    return exists().where(Log.dttm >= Task.start_date, sets_a_state, or_(of_this_run, of_many))


def marked(state: str | None, next_method: str | None, by_hand: bool) -> str | None:
    """Return as what somebody marked a task while it waited for its job, or submitted it; None: nobody did.

    Airflow forgets where a task goes on when the task ends by itself, is cleared or is given up. So an end that still
    knows it was not the task's own: the task, or its whole run, was marked by hand. While the task submits nothing is
    known of where it goes on, and only the audit log tells a mark from a worker that was lost.

    :param by_hand: the audit log tells of a mark in this run.
    """
    ended = str(getattr(state, "value", state))
    possible = {"success", "failed", "skipped"} if by_hand else {"success", "failed"} if next_method else set()
    return ended if ended in possible else None


def _end_job(place: dict[str, Any], note: Note) -> None:
    from mxdist.hooks.cluster import ClusterHook
    from mxdist.store import JobRun

    reach(place["job_key"], "told-of-run" if note.task_id is None else "told-of-task")
    hook = ClusterHook(place["mxdist_conn_id"])
    attempt = JobRun(hook.open(place["runs_uri"]), place["job_key"]).latest()
    if attempt is None or attempt.claim.submitted_at > note.at:
        return
    result = attempt.result()
    preempted = result is not None and result.state.value == "PREEMPTED"
    if (result is not None and not preempted) or (result is None and attempt.cancel_intent() is not None):
        return
    mark = note.mark or place.get("marked")
    reason = f"the task was marked as {mark} in Airflow" if mark else "the DAG run is over in Airflow"
    by, marked_success = "user" if mark else "airflow", mark == "success"
    if preempted:
        attempt.give_up(by, reason, marked_success=marked_success)
        log.info("Job %s, attempt %d: %s, so nobody goes on with it.", place["job_key"], attempt.number, reason)
        _tell_mlflow(attempt, place)
        return
    # The intent alone: the job's own supervisor acts on it within seconds, wherever it runs.
    attempt.request_cancel(by, reason, marked_success=marked_success)
    log.info("Job %s, attempt %d: %s, so it ends.", place["job_key"], attempt.number, reason)


def _tell_mlflow(attempt: Attempt, place: dict[str, Any]) -> None:
    if not place.get("mlflow_conn_id"):
        return
    from mxdist.hooks.mlflow import MlflowHook
    from mxdist.tracking.replay import replay

    hook = MlflowHook(place["mlflow_conn_id"])
    outcome = replay(attempt, attempt.claim.parsed(), login=hook.login(), uri=hook.uri)
    if not outcome.complete:
        log.warning("MLflow was not told (ReconcileJobsOperator does it): %s", outcome.message)


def _close_parent(conn_id: str, parent: str, succeeded: bool) -> None:
    from mxdist.hooks.mlflow import MlflowHook
    from mxdist.tracking.runs import close_parent

    hook = MlflowHook(conn_id)
    close_parent(hook.uri, parent, succeeded, login=hook.login())


def _bounded(work: Any, *args: Any) -> None:
    from mxdist.errors import MxdistError

    for left in reversed(range(_TRIES)):
        try:
            work(*args)
        except MxdistError as error:
            if not (error.retryable and left):
                log.warning("%s", error)
                return
            time.sleep(_PAUSE_S)
        except Exception:  # a deleted connection, say: the other jobs of the note must end all the same
            log.exception("%s failed", work.__name__)
            return
        else:
            return
