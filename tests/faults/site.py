"""A whole Airflow with one training DAG, and what a test does to its runs: hold, kill, mark, look."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from faults.records import Record, Records

from mxdist import processes
from mxdist.launch.client import job_key_for_airflow
from mxdist.store import Attempt, JobRun, Result
from stack.airflow import Component
from stack.airflow_api import ApiError, run_path
from support.airflow_stack import Stack

T = TypeVar("T")

DAG_ID = TASK_ID = "train"
DOOMED_DAG_ID, ABANDONED_DAG_ID = "doomed", "abandoned"
"""The same training, in DAGs that a test may delete."""

REGISTERED_DAG_ID = "registered"
"""The same training, of a registered model."""

RECONCILE_DAG_ID = "reconcile"

RANKS = 2
GENEROUS_S = 300.0
"""A bound against hanging for ever; nothing depends on how long things really take."""


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = GENEROUS_S) -> T:
    """Return the first true value of ``condition``."""
    give_up = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {timeout_s:g} s in vain for {what}"
        time.sleep(0.2)
    return value


def end_of(attempt: Attempt) -> Result:
    """Wait for the result of an attempt."""
    wait_for(lambda: attempt.result() is not None, f"attempt {attempt.number} of {attempt.claim.job_key} to end")
    result = attempt.result()
    assert result is not None
    return result


def _is_gone(token: str) -> bool:
    return not processes.find(token)


def kill(*pids: int) -> None:
    """Kill processes as the kernel would, and wait until they are gone."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(processes.read(pid) is None for pid in pids), f"the end of {pids}")


@contextmanager
def kept_running(*services: Component) -> Iterator[None]:
    """Start again what of these services has died, as a service manager does.

    Airflow's scheduler dies when a run is deleted that it is just looking at (``ObjectDeletedError``).
    """
    over = threading.Event()

    def keep() -> None:
        while not over.wait(2.0):
            for service in services:
                if not service.alive():
                    service.start()

    keeper = threading.Thread(target=keep, name="keeper")
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


@dataclass(frozen=True)
class Site:
    """The Airflow of all fault tests.

    :param barriers: the folder of its barriers.
    :param dataset: what its trainings learn from.
    """

    stack: Stack
    barriers: Path
    dataset: dict[str, Any]

    @property
    def records(self) -> Records:
        """MLflow's own word."""
        return Records(self.stack.mlflow.url)

    def train(self, run_id: str, *, hold: Sequence[str] = (), dag_id: str = DAG_ID, **conf: Any) -> Run:
        """Start a DAG run whose processes will be held at some barriers."""
        run = Run(self, run_id, dag_id)
        run.hold(*hold)
        self.stack.airflow.api.trigger(dag_id, {"dataset": self.dataset, **conf}, dag_run_id=run_id)
        return run

    def reconcile(self) -> dict[str, Any]:
        """Run the reconcile DAG to its end; return what it says that it did."""
        api = self.stack.airflow.api
        run_id = api.trigger(RECONCILE_DAG_ID)
        wait_for(lambda: api.run(RECONCILE_DAG_ID, run_id)["state"] in {"success", "failed"}, "the reconcile DAG")
        assert api.run(RECONCILE_DAG_ID, run_id)["state"] == "success"
        said: dict[str, Any] = api.xcom(RECONCILE_DAG_ID, run_id, "reconcile")
        return said


@dataclass(frozen=True)
class Run:
    """One DAG run of the training, and its job; or one task of another DAG."""

    site: Site
    run_id: str
    dag_id: str
    task_id: str = TASK_ID

    @property
    def job_key(self) -> str:
        """The key of its job."""
        return job_key_for_airflow(self.dag_id, self.run_id, self.task_id, -1)

    def hold(self, *names: str) -> None:
        """Hold every process that comes to one of these barriers."""
        for name in names:
            self.barrier(name, "hold").touch()

    def barrier(self, name: str, what: str) -> Path:
        """Return the file by which a barrier is held, or tells who reached it."""
        return self.site.barriers / f"{self.job_key}.{name}.{what}"

    def reached(self, name: str) -> int:
        """Wait until a process has come to a barrier; return its id."""
        path = self.barrier(name, "reached")
        wait_for(lambda: path.exists() and path.read_text().endswith("\n"), f"{self.run_id} at {name}")
        return int(path.read_text().split()[-1])

    def release(self) -> None:
        """Let go of every process that is held, or will be."""
        for path in self.site.barriers.glob(f"{self.job_key}.*.hold"):
            path.unlink()

    def task(self) -> dict[str, Any]:
        """Return the task instance."""
        return self.site.stack.airflow.api.tasks(self.dag_id, self.run_id)[self.task_id]

    def log(self, number: int = 1) -> list[str]:
        """Return the messages of the log of one of the task's tries."""
        return [entry["event"] for entry in self._log(number)]

    def errors(self, number: int) -> list[str]:
        """Return the errors in the log of one of the task's tries, with all that they tell, as JSON."""
        return [json.dumps(entry) for entry in self._log(number) if entry.get("level") == "error"]

    def _log(self, number: int) -> list[dict[str, Any]]:
        path = f"{run_path(self.dag_id, self.run_id)}/taskInstances/{self.task_id}/logs/{number}"
        found: list[dict[str, Any]] = self.site.stack.airflow.api.get(path)["content"]
        return found

    def link(self, name: str) -> str:
        """Return where a button of the task leads to."""
        path = f"{run_path(self.dag_id, self.run_id)}/taskInstances/{self.task_id}/links"
        return str(self.site.stack.airflow.api.get(path)["extra_links"][name])

    def in_state(self, *states: str) -> dict[str, Any]:
        """Wait until the task is in one of the states; return it."""

        def task() -> dict[str, Any]:
            found = self.task()
            return found if found["state"] in states else {}

        return wait_for(task, f"{self.run_id} to be {' or '.join(states)}")

    def watched(self) -> None:
        """Wait until a living triggerer watches the job and has nothing to tell of it.

        Airflow tells a trigger of a mark only once it runs: not when the task is deferred but no triggerer has begun
        with it, nor just after a trigger has fired and before the task has deferred again.
        """

        def watching() -> bool:
            trigger = self.task().get("trigger")
            if trigger is None:
                return False
            path = self.barrier(f"trigger-{trigger['id']}-awaits-end", "reached")
            return path.exists() and any(processes.read(int(pid)) for pid in path.read_text().split())

        wait_for(watching, f"a triggerer to watch {self.run_id}")

    def ended(self) -> dict[str, Any]:
        """Wait for the task's end; return it."""
        return self.in_state("success", "failed")

    def mark(self, state: str) -> None:
        """Mark the task, as a person does in the UI: again, if SQLite was locked."""
        path = f"{run_path(self.dag_id, self.run_id)}/taskInstances/{self.task_id}"

        def marked() -> bool:
            try:
                self.site.stack.airflow.api.patch(path, {"new_state": state})
            except ApiError as error:
                if error.status != 500:
                    raise
                return False
            return True

        wait_for(marked, f"{self.run_id} to be marked")

    def clear(self) -> None:
        """Clear the task, as a person does in the UI."""
        body = {"dry_run": False, "only_failed": False, "task_ids": [self.task_id], "dag_run_id": self.run_id}
        self.site.stack.airflow.api.post(f"dags/{self.dag_id}/clearTaskInstances", body)

    def delete(self) -> None:
        """Delete the DAG with all its runs, as a person does in the UI: Airflow refuses to delete a running run."""
        self.site.stack.airflow.api.delete(f"dags/{self.dag_id}")

    def deleted(self) -> bool:
        """Return whether Airflow has forgotten the run."""
        try:
            self.site.stack.airflow.api.run(self.dag_id, self.run_id)
        except ApiError as error:
            return error.status == 404
        return False

    def attempts(self) -> list[Attempt]:
        """Return all attempts at the job, oldest first."""
        job = JobRun(self.site.stack.runs(), self.job_key)
        latest = job.latest()
        return [job.attempt(number) for number in range(1, (latest.number if latest else 0) + 1)]

    def attempt(self) -> Attempt:
        """Return the one attempt."""
        (attempt,) = self.attempts()
        return attempt

    def result(self) -> Result:
        """Wait for the result of the one attempt."""
        return end_of(self.attempt())

    def supervisor(self) -> int:
        """Return the process id of the last supervisor."""
        attempt = self.attempt()
        for _, document in attempt.supervisors.read(after=attempt.supervisors.last() - 1):
            return int(document["pid"])
        raise AssertionError(f"{self.run_id} has no supervisor")

    def gone(self) -> None:
        """Wait until no process of any attempt is left."""
        for attempt in self.attempts():
            wait_for(partial(_is_gone, attempt.claim.token), f"the processes of {self.run_id} to end")

    def parents(self) -> list[str]:
        """Return what MLflow says of the parent runs of this DAG run."""
        return [record.status for record in self.site.records.parents(f"{self.dag_id}/{self.run_id}")]

    def records(self) -> list[Record]:
        """Return the MLflow runs of the job, oldest first."""
        return self.site.records.of_job(self.job_key)

    def recorded_as(self, *statuses: str) -> list[Record]:
        """Wait until MLflow has these statuses for the job's runs, oldest first; return the runs."""

        def found() -> list[Record]:
            records = self.records()
            return records if tuple(record.status for record in records) == statuses else []

        return wait_for(found, f"MLflow to say {statuses} of {self.run_id}")

    def losses(self) -> list[tuple[int, float]]:
        """Return every loss that MLflow has of the one run, with its step."""
        (record,) = self.records()
        return self.site.records.history(record.run_id, "loss")


@dataclass(frozen=True)
class Trained:
    """What an undisturbed training ends with.

    :param losses: of every step.
    """

    model_digest: str
    losses: list[tuple[int, float]]


def assert_trained_once(run: Run, expected: Trained) -> None:
    """Check that the run ended as if nothing had happened to it: one training, one record, nothing left."""
    assert run.ended()["state"] == "success"
    result = run.attempt().result()
    assert result is not None
    assert result.state.value == "SUCCEEDED"
    assert result.model_digest == expected.model_digest
    assert [record.status for record in run.records()] == ["FINISHED"]
    assert run.losses() == expected.losses
    run.gone()
