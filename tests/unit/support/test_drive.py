"""The last words of the demo: how the run ended, and where everything is."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from follow.conf import DAG
from follow.drive import RECONCILE_DAG, _report, put_right
from follow.progress import Follower
from mxdist.store import open_store
from mxdist.tracking.client import Client
from stack.airflow_api import AirflowApi, ApiError
from stack.mlflow import Mlflow
from steps import Steps

RUN_PAGE = "http://airflow/dags/retrain/runs/mine"


class Api(AirflowApi):
    """An Airflow whose run of two stages is over."""

    def __init__(self, states: dict[str, str], *, silent: bool = False) -> None:
        super().__init__("http://127.0.0.1:9", "", "")
        self._states = states
        self._silent = silent  # about what stages handed over

    def call(self, method: str, path: str, body: Any = None) -> Any:
        _, _, what = path.partition("?")[0].partition("/dagRuns/")
        if path == "dags/retrain/tasks":
            return {"tasks": [{"task_id": name, "downstream_task_ids": []} for name in self._states]}
        if what.endswith("taskInstances"):
            return {"task_instances": [{"task_id": name, "state": state} for name, state in self._states.items()]}
        if "/xcomEntries/" in what and self._silent:
            raise ApiError("Airflow answered 500", 500)
        if "/xcomEntries/" in what:
            return {"value": {"registered_model": "digits", "registered_version": "3"}}
        if "/logs/" in what:
            return {"content": [{"level": "error", "event": "x is torn"}]}
        return {"state": "success" if set(self._states.values()) == {"success"} else "failed"}


def report(mlflow: Mlflow, tmp_path: Path, api: Api, *, run_id: str = "mine", password: str = "") -> int:
    passwords = SimpleNamespace(mlflow_user="admin" if password else "", mlflow_password=password)
    stack: Any = SimpleNamespace(mlflow=mlflow, passwords=passwords, passwords_file="/home/passwords.json")
    follower = Follower(api, open_store(str(tmp_path)), "retrain", run_id)
    return _report(stack, follower, follower.look(), Steps(), RUN_PAGE)


def shown(out: str) -> dict[str, str]:
    """Return the links that were shown, by name."""
    names = ("DAG run", "MLflow run", "Registered model", "Logins")
    lines = [line.strip() for line in out.splitlines()]
    return {name: line.removeprefix(name).strip() for name in names for line in lines if line.startswith(f"{name}  ")}


@pytest.fixture
def run_id(mlflow_server: Mlflow) -> str:
    """A DAG run whose parent run MLflow has."""
    run_id = uuid.uuid4().hex
    Client(mlflow_server.url).call("create_run", "0", tags={"mxdist.parent": f"retrain/{run_id}"})
    return run_id


GOOD = {"train": "success", "promote": "success"}


def test_good_run_shows_every_link(
    mlflow_server: Mlflow, tmp_path: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(mlflow_server, tmp_path, Api(GOOD), run_id=run_id) == 0
    told = capsys.readouterr()
    links = shown(told.out)
    assert links["DAG run"] == RUN_PAGE
    assert links["MLflow run"].startswith(f"{mlflow_server.url}/#/experiments/0/runs/")
    assert links["Registered model"] == f"{mlflow_server.url}/#/models/digits"
    assert links["Logins"] == "/home/passwords.json"
    assert told.err == ""


def test_failed_stage_is_named_with_its_reason(
    mlflow_server: Mlflow, tmp_path: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {"train": "success", "promote": "failed"}
    assert report(mlflow_server, tmp_path, Api(states), run_id=run_id) == 1
    told = capsys.readouterr()
    assert told.err.split("\n")[1:3] == ["Stage promote failed: x is torn", "The run ended as 'failed'."]
    assert shown(told.out)["Registered model"].endswith("/#/models/digits")
    assert "/runs/" in shown(told.out)["MLflow run"]


def test_missing_parent_run_is_said_and_fails_the_demo(
    mlflow_server: Mlflow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(mlflow_server, tmp_path, Api(GOOD)) == 1
    told = capsys.readouterr()
    links = shown(told.out)
    assert links["MLflow run"] == f"none: MLflow at {mlflow_server.url} has no run of this DAG run"
    assert (links["DAG run"], links["Logins"]) == (RUN_PAGE, "/home/passwords.json")
    assert links["Registered model"].endswith("/#/models/digits")
    assert "not everything that it made was found" in told.err


def test_refusing_mlflow_is_said_and_fails_the_demo(
    secured_mlflow: Mlflow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(secured_mlflow, tmp_path, Api(GOOD), password="wrong-secret") == 1
    told = capsys.readouterr()
    links = shown(told.out)
    assert links["MLflow run"].startswith(f"not found: MLflow at {secured_mlflow.url} refused the login.")
    assert links["DAG run"] == RUN_PAGE
    assert links["Registered model"].endswith("/#/models/digits")
    assert "wrong-secret" not in told.out + told.err


def test_airflow_that_cannot_tell_what_stages_handed_over_leaves_the_other_links(
    mlflow_server: Mlflow, tmp_path: Path, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(mlflow_server, tmp_path, Api(GOOD, silent=True), run_id=run_id) == 1
    told = capsys.readouterr()
    assert "What stage train handed over cannot be read: Airflow answered 500" in told.err
    assert shown(told.out)["Registered model"] == "none: no stage names one"
    assert "/runs/" in shown(told.out)["MLflow run"]


@pytest.mark.parametrize(("runs", "started"), [(0, []), (3, [RECONCILE_DAG])])
def test_what_was_missed_is_put_right_when_services_come_back(runs: int, started: list[str]) -> None:
    triggered: list[str] = []

    class Back(AirflowApi):
        def call(self, method: str, path: str, body: Any = None) -> Any:
            if method == "POST":
                triggered.append(path.split("/")[1])
                return {"dag_run_id": "now"}
            assert path == f"dags/{DAG}/dagRuns?limit=1"
            return {"total_entries": runs}

    put_right(Back("http://127.0.0.1:9", "", ""))
    assert triggered == started


def test_demo_goes_on_without_the_dag_that_puts_things_right(capsys: pytest.CaptureFixture[str]) -> None:
    class Paused(AirflowApi):
        def call(self, method: str, path: str, body: Any = None) -> Any:
            if method == "POST":
                raise ApiError("Airflow answered 404: it is not known", 404)
            return {"total_entries": 1}

    put_right(Paused("http://127.0.0.1:9", "", ""))
    assert "it is not known" in capsys.readouterr().out
