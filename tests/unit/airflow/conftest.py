"""Airflow without a database: a home of its own, connections from the environment, a run store in a folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.airflow.world import Pretender

from mxdist.launch.client import JobClient
from mxdist.launch.local import LocalLauncher
from mxdist.spec import TrainingJob
from mxdist.store import Attempt, JobRun, open_store

# Airflow reads these when it is first imported: by the test modules of this folder, not by what is imported above.
_HOME = tempfile.TemporaryDirectory(prefix="mxdist-airflow-", ignore_cleanup_errors=True)
os.environ["AIRFLOW_HOME"] = _HOME.name
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
os.environ["AIRFLOW__CORE__DAGS_FOLDER"] = str(Path(__file__).parents[3] / "dags")

JOB = {"name": "job", "script": {"path": "/train.py"}, "limits": {"grace_s": 0.1}}


@pytest.fixture
def runs_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run store in a folder, and the connections that lead there."""
    uri = str(tmp_path / "runs")
    extra = {
        "runs_uri": uri,
        "data_uri": str(tmp_path / "data"),
        "node_python": "/bin/false",
        "workdir": str(tmp_path / "work"),
    }
    connection = {"conn_type": "mxdist", "login": "key", "password": "canary-secret", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_DEFAULT", json.dumps(connection))
    return uri


@pytest.fixture
def client(runs_uri: str) -> JobClient:
    """A client of that run store."""
    return JobClient(open_store(runs_uri), LocalLauncher())


@pytest.fixture
def attempt(client: JobClient) -> Attempt:
    """A first attempt of a job that nobody has started."""
    return JobRun(client.runs, "job-1").claim(TrainingJob.parse(JOB), after=0)


@pytest.fixture
def platform(runs_uri: str, monkeypatch: pytest.MonkeyPatch) -> Pretender:
    """The hook leads to a platform that only pretends."""
    from mxdist.hooks.cluster import ClusterHook

    launcher = Pretender()

    def job_client(self: ClusterHook, runs: str | None = None) -> JobClient:
        return JobClient(open_store(runs or self.settings.runs_uri), launcher)

    monkeypatch.setattr(ClusterHook, "job_client", job_client)
    return launcher


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A script beside nothing else."""
    path = tmp_path / "script" / "train.py"
    path.parent.mkdir()
    path.write_text("print('hello')\n")
    return str(path)


@pytest.fixture
def make(script: str) -> Callable[..., Any]:
    """Each call is the operator in a new worker process."""

    from mxdist.operators.train import DistributedTrainOperator

    def operator(**fields: Any) -> DistributedTrainOperator:
        return DistributedTrainOperator(**{"task_id": "train", "script": script, "mlflow_conn_id": None, **fields})

    return operator


@pytest.fixture
def latest(platform: Pretender, runs_uri: str) -> Callable[[], Attempt]:
    """The attempt that counts, of the only job there is."""

    def find() -> Attempt:
        client = JobClient(open_store(runs_uri), platform)
        (key,) = client.job_keys()
        return client.attempt(key)

    return find


@pytest.fixture
def anyio_backend() -> str:
    """Coroutine tests run as a triggerer runs triggers: on asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_connections() -> Iterator[None]:
    """Leave no connection of the caller's own environment within reach."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("AIRFLOW_CONN_")}
    for name in kept:
        del os.environ[name]
    yield
    os.environ.update(kept)
