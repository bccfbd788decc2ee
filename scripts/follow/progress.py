"""What is known of a DAG run right now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from mxdist.errors import MxdistError
from mxdist.launch.client import job_key_for_airflow
from mxdist.store import JobRun, State, Store
from stack.airflow_api import AirflowApi, ApiError

ENDED = {"success", "failed"}
_ACTIVE = {"running", "deferred"}
_OVER = {"success", "failed", "skipped", "upstream_failed", "removed"}


@dataclass(frozen=True)
class Stage:
    """One task of the run.

    :param state: Airflow's word for it; None while it waits for others.
    :param seconds: since its job was submitted, or else since Airflow says that it began, to now or its end.
    :param job: what its training job last reported, while it runs.
    :param retry_at: when it is tried again, in Unix seconds, if it waits for that.
    """

    task_id: str
    state: str | None
    seconds: float
    tries: int
    job: State | None = None
    retry_at: float | None = None

    @property
    def active(self) -> bool:
        """Whether it is at work."""
        return self.state in _ACTIVE


@dataclass(frozen=True)
class Snapshot:
    """The whole run.

    :param ahead: the earlier run that this one waits for while it is queued, and where that run is.
    """

    state: str
    stages: tuple[Stage, ...]
    ahead: Ahead | None = None


@dataclass(frozen=True)
class Ahead:
    """An earlier run.

    :param stage: the first of its stages that is not over; None if none has begun.
    """

    run_id: str
    stage: Stage | None = None


class Follower:
    """Reads one DAG run.

    :param runs: the run store, for what trainings report while Airflow only says "deferred".
    """

    def __init__(self, api: AirflowApi, runs: Store, dag_id: str, run_id: str) -> None:
        self.dag_id = dag_id
        self.run_id = run_id
        self._api = api
        self._runs = runs
        tasks = api.get(f"dags/{dag_id}/tasks")["tasks"]
        self._order = order_of(tasks)
        self._begun: dict[str, float] = {}  # when jobs were submitted: Airflow's own time begins anew after each wait
        self._retry_delays = {task["task_id"]: _delay_s(task.get("retry_delay")) for task in tasks}

    def look(self) -> Snapshot:
        """Return how things stand.

        :raises ApiError: Airflow does not answer.
        """
        state = self._api.run(self.dag_id, self.run_id)["state"]
        ahead = self._ahead() if state == "queued" else None
        stages = [self._stage(task_id, task) for task_id, task in self._tasks(self.run_id)]
        return Snapshot(state, tuple(replace(stage, job=self._job(stage)) for stage in stages), ahead)

    def _ahead(self) -> Ahead | None:
        running = self._api.get(f"dags/{self.dag_id}/dagRuns", state="running", limit=1)["dag_runs"]
        if not running:
            return None
        run_id = str(running[0]["dag_run_id"])
        stages = [self._stage(task_id, task) for task_id, task in self._tasks(run_id)]
        return Ahead(run_id, next((stage for stage in stages if stage.state not in _OVER), None))

    def _tasks(self, run_id: str) -> list[tuple[str, Mapping[str, Any]]]:
        found = self._api.tasks(self.dag_id, run_id)
        return [(task_id, found.get(task_id, {})) for task_id in self._order]

    def _stage(self, task_id: str, task: Mapping[str, Any]) -> Stage:
        retry_at = None
        if task.get("state") == "up_for_retry" and task.get("end_date"):
            retry_at = datetime.fromisoformat(task["end_date"]).timestamp() + self._retry_delays.get(task_id, 0.0)
        seconds = _seconds(task, self._begun.get(task_id))
        return Stage(task_id, task.get("state"), seconds, int(task.get("try_number") or 0), retry_at=retry_at)

    def _job(self, stage: Stage) -> State | None:
        if not stage.active:
            return None
        key = job_key_for_airflow(self.dag_id, self.run_id, stage.task_id, -1)
        try:
            attempt = JobRun(self._runs, key).latest()
            if attempt is None:
                return None
            self._begun.setdefault(stage.task_id, attempt.claim.submitted_at)
            return attempt.read_state()
        except MxdistError:
            return None  # the view goes on without it

    def result(self, task_id: str) -> Any:
        """Return what a task handed over."""
        return self._api.xcom(self.dag_id, self.run_id, task_id)

    def reason(self, stage: Stage) -> str:
        """Return why a task failed, in its own last words."""
        path = f"dags/{self.dag_id}/dagRuns/{self.run_id}/taskInstances/{stage.task_id}/logs/{max(stage.tries, 1)}"
        try:
            return reason_of(self._api.get(path)["content"])
        except (ApiError, KeyError, TypeError):
            return "its log cannot be read"


def order_of(tasks: list[dict[str, Any]]) -> list[str]:
    """Return the task ids, each after those that it waits for."""
    before: dict[str, set[str]] = {task["task_id"]: set() for task in tasks}
    for task in tasks:
        for downstream in task["downstream_task_ids"]:
            before[downstream].add(task["task_id"])
    order: list[str] = []
    while before:
        ready = sorted(task_id for task_id, waits_for in before.items() if not waits_for - set(order))
        order += ready
        for task_id in ready:
            del before[task_id]
    return order


def reason_of(events: list[Any]) -> str:
    """Return the last error that a task's log names."""
    found = "its log names no error; somebody may have marked it"
    for event in events:
        if not isinstance(event, dict):
            continue
        details = event.get("error_detail") or []
        if details:
            found = str(details[0].get("exc_value") or details[0].get("exc_type"))
        elif event.get("level") in {"error", "critical"}:
            found = str(event.get("event"))
    return found


def _delay_s(delay: Any) -> float:
    """Return the seconds of a duration as the API tells it."""
    if not isinstance(delay, dict):
        return float(delay or 0)
    return float(delay.get("days", 0) * 86400 + delay.get("seconds", 0) + delay.get("microseconds", 0) / 1e6)


def _seconds(task: Mapping[str, Any], submitted_at: float | None) -> float:
    if not task.get("start_date"):
        return 0.0
    begin = datetime.fromisoformat(task["start_date"]).timestamp()
    begin = begin if submitted_at is None else min(begin, submitted_at)
    end = datetime.fromisoformat(task["end_date"]).timestamp() if task.get("end_date") else time.time()
    return max(0.0, end - begin)
