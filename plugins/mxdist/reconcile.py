"""What others left undone: jobs that nobody wants any more, cancels whose supervisor died, words that MLflow missed.

Doing it again changes nothing, and two may do it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from mxdist.errors import MxdistError
from mxdist.launch import JobClient, Life
from mxdist.spec import JobState
from mxdist.store import Attempt, JobRun, Result

TASK_OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
TASK_ACTIVE = frozenset(
    {"scheduled", "queued", "running", "deferred", "restarting", "up_for_retry", "up_for_reschedule"}
)
AIRFLOW = "airflow"
"""The key of a claim's source that names the Airflow that asked, if it has a name."""

AIRFLOW_ID = "MXDIST_AIRFLOW_ID"
"""The environment variable with an Airflow's name: it stays the same when the address changes."""

PARENT_STATUS = {"success": "FINISHED", "failed": "FAILED"}
"""What MLflow's parent run says, by the state in which its DAG run ended."""


@dataclass(frozen=True)
class Step:
    """Something that was done, or could not be.

    :param good: whether it went well.
    :param urgent: it did not, and a job may go on that nobody wants.
    """

    message: str
    good: bool = True
    urgent: bool = False


@dataclass(frozen=True)
class TaskName:
    """The Airflow task that asked for a job.

    :param airflow: name, or else address, of the Airflow that it belongs to; another one's runs are none of ours.
    """

    airflow: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int

    @classmethod
    def of(cls, source: Mapping[str, str]) -> Self | None:
        """Return the task that a claim's source names; None if no Airflow asked."""
        try:
            return cls(
                airflow=airflow_of(source["url"], source.get(AIRFLOW)),
                dag_id=source["dag_id"],
                run_id=source["run_id"],
                task_id=source["task_id"],
                map_index=int(source["map_index"]),
            )
        except (KeyError, ValueError):
            return None


class Airflow(Protocol):
    """What is asked of Airflow; any exception means that it gave no definite answer."""

    def run_state(self, dag_id: str, run_id: str) -> str | None:
        """Return the state of a DAG run; None when there is no such run."""

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
        """Return the state of a task instance, which may be None."""


def airflow_of(log_url: str, name: str | None) -> str:
    """Return which Airflow a task's page belongs to: by the name that it was given, else by its address.

    :raises ValueError: it is no task's page.
    """
    return name or log_url[: log_url.index("/dags/")]


def unwanted(run: str | None, task: str | None) -> str | None:
    """Return why nobody wants the job of a task any more, or None while somebody may.

    :param run: the state of its DAG run; None: the run was deleted.
    :param task: the state of the task; None: it was cleared, or has not begun.
    """
    if run is None:
        return "its DAG run was deleted"
    if task in TASK_OVER:
        return f"its task is {task}"
    if run in PARENT_STATUS and task not in TASK_ACTIVE:
        return f"its DAG run is over ({run})"
    return None


def parent_status(run: str | None) -> str | None:
    """Return what the MLflow parent run of a DAG run must say; None while the DAG run goes on."""
    return "KILLED" if run is None else PARENT_STATUS.get(run)


def latest_of_airflow(client: JobClient, airflow: str) -> Iterator[tuple[Attempt, TaskName] | Step]:
    """Yield the attempt that counts of every job that this Airflow asked for, or what is wrong with the job."""
    for job_key in client.job_keys():
        try:
            attempt = JobRun(client.runs, job_key).latest()
        except MxdistError as error:  # one broken job must not keep the others waiting
            yield Step(f"{job_key}: {error}", good=False)
            continue
        task = TaskName.of(attempt.claim.source) if attempt else None
        if attempt is not None and task is not None and task.airflow == airflow:
            yield attempt, task


def end_unwanted(client: JobClient, asked: list[tuple[Attempt, TaskName]], airflow: Airflow) -> Iterator[Step]:
    """End the jobs whose task does not want them any more.

    An attempt must have been read before Airflow is asked: a task that is cleared meanwhile has a new attempt, and
    only the old one is ended.
    """
    told: list[tuple[Attempt, str]] = []
    for attempt, task in asked:
        try:
            result = attempt.result()
            if not _may_be_wanted(attempt, result):
                continue
            run = airflow.run_state(task.dag_id, task.run_id)
            state = None if run is None else airflow.task_state(*_identity(task))
            if (reason := unwanted(run, state)) is None:
                continue
            if result is None:
                attempt.request_cancel("reconciler", reason, marked_success=state == "success")
                told.append((attempt, reason))
            else:
                attempt.give_up("reconciler", reason, marked_success=state == "success")
                yield Step(f"{_named(attempt)}: {reason}; nobody goes on with what was preempted")
        except Exception as error:  # Airflow's are of any kind
            yield Step(f"{_named(attempt)}: nobody knows whether it is wanted: {error}", good=False, urgent=True)
    for attempt, reason in told:
        try:
            result = client.cancel(attempt, by="reconciler", reason=reason)
            yield Step(f"{_named(attempt)}: {reason}; ended as {result.state.value}")
        except MxdistError as error:
            yield Step(f"{_named(attempt)}: {reason}, but: {error}", good=False, urgent=True)


def finish_all(client: JobClient, logins: Mapping[str, Any] | None = None) -> Iterator[Step]:
    """Act on cancels whose supervisor died, and tell MLflow what it missed, for every attempt at every job.

    :param logins: by MLflow server; default: what the environment holds.
    """
    for job_key in client.job_keys():
        try:
            for attempt in _attempts(JobRun(client.runs, job_key)):
                yield from _finish(client, attempt, logins or {})
        except MxdistError as error:
            yield Step(f"{job_key}: {error}", good=False)


def close_parents(uri: str, login: Any, asked: list[tuple[Attempt, TaskName]], airflow: Airflow) -> Iterator[Step]:
    """Close the MLflow parent runs of DAG runs that are over, or were deleted."""
    from mxdist.tracking.parents import close, open_parents

    ours = {key: task for attempt, task in asked if (key := _parent(attempt, uri)) is not None}
    try:
        still_open = {key: ids for key, ids in open_parents(uri, login=login).items() if key in ours}
    except MxdistError as error:
        yield Step(f"parent runs: {error}", good=False)
        return
    for key, run_ids in still_open.items():
        try:
            status = parent_status(airflow.run_state(ours[key].dag_id, ours[key].run_id))
            if status is not None:
                close(uri, run_ids, status, login=login)
                yield Step(f"parent run {key}: closed as {status}")
        except Exception as error:
            yield Step(f"parent run {key} stays open: {error}", good=False)


def project_champions(client: JobClient, uri: str, login: Any) -> Iterator[Step]:
    """Move the aliases of promotions that MLflow missed."""
    from mxdist.tracking.registry import Registry

    registry = Registry(client.runs, uri, login=login)
    for name in registry.names():
        try:
            if registry.project(name):
                yield Step(f"model {name}: the alias is moved to the champion")
        except MxdistError as error:
            yield Step(f"model {name}: {error}", good=False)


def _attempts(run: JobRun) -> Iterator[Attempt]:
    latest = run.latest()
    for number in range(1, latest.number + 1 if latest else 1):
        yield run.attempt(number)


def _may_be_wanted(attempt: Attempt, result: Result | None) -> bool:
    """Whether Airflow must be asked: the attempt goes on, or waits for the retry that resumes it."""
    if result is None:
        return attempt.cancel_intent() is None
    return result.state is JobState.PREEMPTED and attempt.given_up() is None


def _finish(client: JobClient, attempt: Attempt, logins: Mapping[str, Any]) -> Iterator[Step]:
    result = attempt.result()
    if result is None and attempt.cancel_intent() is not None and client.launcher.life(attempt) is not Life.ALIVE:
        result = client.cancel(attempt, by="reconciler", reason="its supervisor died", wait_s=0)
        yield Step(f"{_named(attempt)}: ended as {result.state.value}")
    job = attempt.claim.parsed()
    if result is None or job.tracking.uri is None:
        return
    from mxdist.tracking.delivery import Progress
    from mxdist.tracking.replay import last_word, replay

    if result.tracking_complete and last_word(attempt, result).state is result.state:
        return
    before = Progress.read(attempt)
    outcome = replay(attempt, job, login=logins.get(job.tracking.uri))
    if outcome.complete and Progress.read(attempt) == before:  # somebody has told MLflow since
        return
    done = "MLflow has everything" if outcome.complete else f"MLflow still lacks something: {outcome.message}"
    yield Step(f"{_named(attempt)}: {done}", outcome.complete)


def _identity(task: TaskName) -> tuple[str, str, str, int]:
    return task.dag_id, task.run_id, task.task_id, task.map_index


def _parent(attempt: Attempt, uri: str) -> str | None:
    tracking = attempt.claim.job.get("tracking") or {}
    return tracking.get("parent") if tracking.get("uri") == uri else None


def _named(attempt: Attempt) -> str:
    return f"{attempt.claim.job_key} attempt {attempt.number}"
