"""What is known of a DAG run right now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mxdist.errors import MxdistError
from mxdist.launch.client import job_key_for_airflow
from mxdist.store import JobRun, State, Store
from stack.airflow_api import AirflowApi, ApiError

ENDED = {"success", "failed"}
_ACTIVE = {"running", "deferred"}


@dataclass(frozen=True)
class Stage:
    """One task of the run.

    :param state: Airflow's word for it; None while it waits for others.
    :param job: what its training job last reported, while it runs.
    """

    task_id: str
    state: str | None
    seconds: float
    tries: int
    job: State | None = None

    @property
    def active(self) -> bool:
        """Whether it is at work."""
        return self.state in _ACTIVE


@dataclass(frozen=True)
class Snapshot:
    """The whole run."""

    state: str
    stages: tuple[Stage, ...]


class Follower:
    """Reads one DAG run.

    :param runs: the run store, for what trainings report while Airflow only says "deferred".
    """

    def __init__(self, api: AirflowApi, runs: Store, dag_id: str, run_id: str) -> None:
        self.dag_id = dag_id
        self.run_id = run_id
        self._api = api
        self._runs = runs
        self._order = order_of(api.get(f"dags/{dag_id}/tasks")["tasks"])

    def look(self) -> Snapshot:
        """Return how things stand.

        :raises ApiError: Airflow does not answer.
        """
        state = self._api.run(self.dag_id, self.run_id)["state"]
        found = self._api.tasks(self.dag_id, self.run_id)
        return Snapshot(state, tuple(self._stage(task_id, found.get(task_id, {})) for task_id in self._order))

    def _stage(self, task_id: str, task: Mapping[str, Any]) -> Stage:
        stage = Stage(task_id, task.get("state"), _seconds(task), int(task.get("try_number") or 0))
        return Stage(**{**vars(stage), "job": self._job(task_id)}) if stage.active else stage

    def _job(self, task_id: str) -> State | None:
        key = job_key_for_airflow(self.dag_id, self.run_id, task_id, -1)
        try:
            attempt = JobRun(self._runs, key).latest()
            return attempt.read_state() if attempt else None
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
    found = "its log names no error"
    for event in events:
        if not isinstance(event, dict):
            continue
        details = event.get("error_detail") or []
        if details:
            found = str(details[0].get("exc_value") or details[0].get("exc_type"))
        elif event.get("level") in {"error", "critical"}:
            found = str(event.get("event"))
    return found


def _seconds(task: Mapping[str, Any]) -> float:
    if not task.get("start_date"):
        return 0.0
    begin = datetime.fromisoformat(task["start_date"]).timestamp()
    end = datetime.fromisoformat(task["end_date"]).timestamp() if task.get("end_date") else time.time()
    return max(0.0, end - begin)
