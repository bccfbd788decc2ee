"""A platform that only pretends to run jobs, and tasks that only pretend to be Airflow's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from mxdist.launch.base import Launcher, Life
from mxdist.launch.bundle import Bundle
from mxdist.launch.plan import Plan, build_plan
from mxdist.spec import EvaluationJob, JobState, TrainingJob
from mxdist.store import Attempt, Cause, Result

RUN_START = datetime(2026, 3, 2, 3, tzinfo=UTC)


@dataclass
class Pretender(Launcher):
    """Notes what was started and ended."""

    started: list[tuple[int, int]] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    secrets: list[dict[str, str]] = field(default_factory=list)

    def plan(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> Plan:
        return build_plan(job, job_key, runs_uri=runs_uri, python="/python", workdir="/work", cores=[0])

    def start(self, attempt: Attempt, bundle: Bundle, *, incarnation: int, secrets: Mapping[str, str]) -> bool:
        attempt.supervisors.append(incarnation, {"pid": 1})
        self.started.append((attempt.number, incarnation))
        self.alive.add(attempt.number)
        self.secrets.append(dict(secrets))
        return True

    def life(self, attempt: Attempt) -> Life:
        if attempt.number in self.alive and attempt.result() is None:
            return Life.DEAD if attempt.cancel_intent() else Life.ALIVE
        return Life.DEAD if attempt.supervisors.last() else Life.NEVER

    def kill(self, attempt: Attempt, *, grace_s: float) -> None:
        self.alive.discard(attempt.number)


class Task(SimpleNamespace):
    """A task instance, with what an operator asks of it."""

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = value


def context_of(
    operator: Any,
    *,
    try_number: int = 1,
    max_tries: int = 1,
    map_index: int = -1,
    start: datetime = RUN_START,
    **run: Any,
) -> Any:
    """Return the context of one try."""
    task = Task(
        dag_id="a_dag",
        run_id="a_run",
        task_id=operator.task_id,
        map_index=map_index,
        try_number=try_number,
        max_tries=max_tries,
        log_url="http://airflow/dags/a_dag/log",
        xcoms={},
    )
    dates = {"data_interval_end": None, "logical_date": None, "run_after": RUN_START, **run}
    said: dict[str, Any] = {}
    state = SimpleNamespace(said=said, set=said.__setitem__, get=said.get)
    run_ = SimpleNamespace(start_date=start, **dates)
    return {"ti": task, "task": operator, "dag_run": run_, "task_state_store": state}


def end(attempt: Attempt, state: JobState = JobState.SUCCEEDED, cause: Cause | None = None, **more: Any) -> Result:
    """Write the result that a supervisor would."""
    return attempt.finish(Result(state=state, ended_at=time.time(), cause=cause, **more))
