"""An Airflow home per test, with connections to real S3, real MLflow and the node environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from system.home import Airflow

from mxdist.store import Credentials, open_store
from stack.mlflow import Mlflow
from stack.seaweed import Seaweed
from support.places import REPOSITORY, control_bin, node_python


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
def airflow(tmp_path: Path, migrated: Path, seaweed: Seaweed, bucket: str, mlflow_server: Mlflow) -> Airflow:
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
