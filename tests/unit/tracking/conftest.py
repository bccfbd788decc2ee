"""One training, a real MLflow server, and a relay before it that can misbehave."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, Cause, JobRun, Result, Store, open_store
from mxdist.store.folder import FolderStore
from mxdist.tracking.client import Client
from mxdist.tracking.forwarder import Forwarder
from mxdist.tracking.journal import JournalWriter
from stack.mlflow import Mlflow
from support.mlflow_proxy import MlflowProxy

VERSION = "ab" * 32

Job = Callable[..., TrainingJob]
Claim = Callable[..., Attempt]
Begin = Callable[[], tuple[TrainingJob, Attempt, Forwarder]]


def written(journal: Path, key: str = "loss") -> list[tuple[int, float, int]]:
    """Return what MLflow must have: the journal's records, read by the json module alone."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return [(line["step"], line["value"], line["time_ms"]) for line in lines if line["key"] == key]


def finished(attempt: Attempt, state: JobState = JobState.SUCCEEDED, cause: Cause | None = None) -> Attempt:
    """Record how an attempt ended, and return it."""
    attempt.finish(Result(state=state, ended_at=time.time(), cause=cause))
    return attempt


def train(journal: Path, steps: range) -> None:
    """Write the journal of a session that took these steps."""
    writer = JournalWriter(journal)
    for step in steps:
        writer.append({"loss": 1 / (step + 1), "accuracy": step / 1000}, step=step)
    writer.close()


@pytest.fixture
def no_slow_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound each call tighter than in real life, so that a hung server is noticed soon."""
    monkeypatch.setattr("mxdist.tracking.client.CALL_TIMEOUT_S", 3)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Where the journal of a training will be."""
    return tmp_path / "journal.jsonl"


@pytest.fixture
def proxy(mlflow_server: Mlflow) -> Iterator[MlflowProxy]:
    """A relay to the server; everything passes until a test says otherwise."""
    with MlflowProxy(mlflow_server.url) as relay:
        yield relay


@pytest.fixture
def runs(tmp_path: Path) -> Store:
    """An empty store of runs."""
    return open_store(str(tmp_path / "runs"))


@pytest.fixture
def make_job() -> Callable[..., TrainingJob]:
    """Return a function that makes a job; every test gets an experiment of its own."""
    experiment = f"test-{uuid.uuid4().hex[:10]}"

    def make(uri: str | None, **changes: Any) -> TrainingJob:
        tracking = {"uri": uri, "experiment": experiment, **changes.pop("tracking", {})}
        document: dict[str, Any] = {
            "name": "digits",
            "model": {"name": "lenet"},
            "dataset": {"manifest_uri": "/data/digits/manifests/v.json", "version": VERSION},
            "tracking": tracking,
        }
        return TrainingJob.parse({**document, **changes})

    return make


@pytest.fixture
def claim(runs: Store) -> Callable[..., Attempt]:
    """Return a function that claims an attempt at a job."""

    def make(job: TrainingJob, *, after: int = 0, origin: int | None = None, key: str = "digits-1") -> Attempt:
        source = {"dag_id": "retrain", "run_id": "manual__1", "task_id": "train", "try": str(after + 1)}
        return JobRun(runs, key).claim(job, after=after, origin=origin, code_digest="c0de", source=source)

    return make


@pytest.fixture
def begin(proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path) -> Begin:
    """Return a function that claims an attempt at a job and starts its forwarder, behind the relay."""

    def start() -> tuple[TrainingJob, Attempt, Forwarder]:
        job = make_job(proxy.url)
        attempt = claim(job)
        forwarder = Forwarder(attempt, job, journal)
        forwarder.start()
        return job, attempt, forwarder

    return start


class MeetingStore(FolderStore):
    """A folder where all who are about to create a certain document wait for each other."""

    def __init__(self, folder: Path, ending: str, meeting: threading.Barrier) -> None:
        super().__init__(folder)
        self._ending, self._meeting = ending, meeting

    def create(self, key: str, data: bytes) -> bool:
        if self._path(key).as_posix().endswith(self._ending):
            self._meeting.wait(timeout=120)
        return super().create(key, data)

    def child(self, prefix: str) -> MeetingStore:
        return MeetingStore(self._path(prefix), self._ending, self._meeting)


@pytest.fixture
def meeting(tmp_path: Path) -> Callable[[str, int], Store]:
    """Return a function that opens the store of runs so that ``count`` writers meet before they create ``ending``."""
    return lambda ending, count: MeetingStore(tmp_path / "runs", ending, threading.Barrier(count))


class Mirror:
    """What MLflow has, read by a client of its own that mxdist's code knows nothing of."""

    def __init__(self, uri: str) -> None:
        self.client = Client(uri)

    def runs(self, job: TrainingJob) -> list[Any]:
        """Return the runs of the job's experiment, parents left out."""
        experiment = self.client.call("get_experiment_by_name", job.tracking.experiment)
        found = self.client.call("search_runs", [experiment.experiment_id]) if experiment else []
        return [run for run in found if "mxdist.parent" not in run.data.tags]

    def run(self, job: TrainingJob) -> Any:
        """Return the one run of the job's experiment."""
        (run,) = self.runs(job)
        return run

    def points(self, job: TrainingJob, key: str = "loss") -> list[tuple[int, float, int]]:
        """Return (step, value, time) of every point of a metric."""
        history = self.client.call("get_metric_history", self.run(job).info.run_id, key)
        return sorted((point.step, point.value, point.timestamp) for point in history)


@pytest.fixture
def mlflow_has(mlflow_server: Mlflow) -> Mirror:
    """Return a reader of the server."""
    return Mirror(mlflow_server.url)


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Return a function that waits, for a generous time, until a condition holds."""

    def wait(condition: Callable[[], object]) -> None:
        give_up = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < give_up, "waited two minutes for it"
            time.sleep(0.02)

    return wait
