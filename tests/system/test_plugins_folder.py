"""The whole chain of processes with mxdist in Airflow's plugins folder, and installed nowhere."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from mxdist.spec import JobState
from stack.processes import wait_until
from support.airflow_stack import StackFactory
from support.bare_control import bare_control, copy_of_plugins
from support.places import REPOSITORY

_PATIENCE_S = 300


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which nobody can import mxdist."""
    found = bare_control(tmp_path_factory.mktemp("control"), Path(sysconfig.get_path("purelib")))
    tried = subprocess.run([found / "python", "-I", "-c", "import mxdist"], cwd="/", capture_output=True, text=True)
    assert "No module named 'mxdist'" in tried.stderr
    return found


def test_deferred_job_of_the_plugins_folder(airflow_stack: StackFactory, control: Path, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "dags", tmp_path / "dags", ignore=shutil.ignore_patterns("m*.py", "__pycache__"))
    plugins = copy_of_plugins(tmp_path / "plugins")
    stack = airflow_stack(dags=tmp_path / "dags", plugins=plugins, program=control / "airflow")
    api = stack.airflow.api
    assert wait_until(lambda: [dag["dag_id"] for dag in api.get("dags")["dags"]] == ["own_script"], _PATIENCE_S)
    run_id = api.trigger("own_script", {"epochs": 2})
    assert wait_until(lambda: api.run("own_script", run_id)["state"] in ("success", "failed"), _PATIENCE_S)
    assert api.run("own_script", run_id)["state"] == "success"
    result = api.xcom("own_script", run_id, "train")
    assert (result["state"], result["attempt"]) == (JobState.SUCCEEDED, 1)
    assert result["mlflow_run_url"].startswith(stack.mlflow.url)
    assert wait_until(lambda: stack.jobs() == [], 60)
