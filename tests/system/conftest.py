"""An Airflow home per test, with connections to real S3, real MLflow and the node environment."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mxdist.store import Credentials, Store, open_store
from stack.mlflow import Mlflow
from stack.seaweed import Seaweed
from support.places import REPOSITORY, control_bin, node_python

MARK = "MXDIST-RESULT "


@dataclass(frozen=True)
class Ended:
    """How a DAG run ended.

    :param results: what each task returned.
    :param xcoms: everything each task pushed.
    """

    state: str
    run_id: str
    tasks: dict[str, str]
    xcoms: dict[str, dict[str, Any]]
    output: str

    @property
    def results(self) -> dict[str, Any]:
        return {task: values.get("return_value") for task, values in self.xcoms.items()}


@dataclass(frozen=True)
class Airflow:
    """A home for Airflow, and the environment its processes get."""

    environment: dict[str, str] = field(repr=False)
    runs: Store
    mlflow_url: str

    def run(self, dag: str, *, conf: dict[str, Any] | None = None, file: Path | None = None) -> Ended:
        """Run a DAG of ``dags/`` to its end in one process."""
        path = file or REPOSITORY / "dags" / f"{dag}.py"
        program = Path(__file__).parent / "run_dag.py"
        command = [str(control_bin() / "python"), str(program), str(path), dag, json.dumps(conf or {})]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=560)
        output = done.stdout + done.stderr
        found = [line.partition(MARK)[2] for line in done.stdout.splitlines() if line.startswith(MARK)]
        assert found, output[-8000:]
        return Ended(**json.loads(found[-1]), output=output)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty Airflow database, made once."""
    home = tmp_path_factory.mktemp("airflow")
    environment = {"PATH": "/usr/bin:/bin", "AIRFLOW_HOME": str(home), "HOME": str(home)}
    command = [str(control_bin() / "airflow"), "db", "migrate"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return home / "airflow.db"


@pytest.fixture
def airflow(
    tmp_path: Path, migrated: Path, seaweed: Seaweed, bucket: str, mlflow_server: Mlflow
) -> Airflow:
    """A fresh Airflow with the plugins folder of this repository."""
    home = tmp_path / "airflow"
    home.mkdir()
    (home / "airflow.db").write_bytes(migrated.read_bytes())
    runs_uri = f"s3://{bucket}/runs"
    cluster = {
        "conn_type": "mxdist",
        "login": seaweed.access_key,
        "password": seaweed.credentials["AWS_SECRET_ACCESS_KEY"],
        "extra": {
            "runs_uri": runs_uri,
            "data_uri": f"s3://{bucket}/data",
            "node_python": str(node_python()),
            "workdir": str(tmp_path / "work"),
            "endpoint_url": seaweed.endpoint_url,
        },
    }
    environment = {
        "PATH": f"{control_bin()}:/usr/bin:/bin",
        "HOME": str(home),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(REPOSITORY / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPOSITORY / "plugins"),
        "AIRFLOW_CONN_MXDIST_DEFAULT": json.dumps(cluster),
        "AIRFLOW_CONN_MXDIST_MLFLOW": json.dumps({"conn_type": "mxdist_mlflow", "host": mlflow_server.url}),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MXDIST_CACHE": str(tmp_path / "cache"),
    }
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    credentials = Credentials(seaweed.access_key, seaweed.credentials["AWS_SECRET_ACCESS_KEY"])
    runs = open_store(runs_uri, endpoint_url=seaweed.endpoint_url, credentials=credentials)
    return Airflow(environment, runs, mlflow_server.url)
