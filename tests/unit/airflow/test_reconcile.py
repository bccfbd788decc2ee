"""What the reconcile task does about jobs that nobody wants any more, and about what MLflow missed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from mlflow import MlflowClient
from unit.airflow.world import Pretender, context_of, end

from mxdist.operators.life import source_of
from mxdist.operators.reconcile import ReconcileJobsOperator
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, Cause, JobRun, open_store
from mxdist.store.run import INDEX
from mxdist.tracking.client import Client
from mxdist.tracking.delivery import Progress
from mxdist.tracking.gate import Rule, Scores
from mxdist.tracking.registry import Candidate, Registry
from mxdist.tracking.runs import find_or_create_parent, find_or_create_run
from stack.mlflow import Mlflow

HERE = "http://airflow"
SOURCE = {"dag_id": "a_dag", "run_id": "a_run", "task_id": "train", "map_index": "-1", "url": f"{HERE}/dags/a_dag/runs"}


class Answers:
    """An Airflow with one run, or none; it may be out of reach."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: str | None = "running"
        self.task: str | None = "deferred"
        self.broken = False
        self.asked: list[dict[str, Any]] = []
        for name in ("get_dr_count", "get_dagrun_state", "get_task_states"):
            monkeypatch.setattr(RuntimeTaskInstance, name, staticmethod(getattr(self, name)))

    def get_dr_count(self, **query: Any) -> int:
        self.asked.append(query)
        if self.broken:
            raise RuntimeError("GENERIC_ERROR: the API server restarts")
        return 0 if self.run is None else 1

    def get_dagrun_state(self, **_: Any) -> str | None:
        return self.run

    def get_task_states(self, *, task_ids: list[str], map_index: int, **_: Any) -> dict[str, Any]:
        name = task_ids[0] if map_index < 0 else f"{task_ids[0]}_{map_index}"
        return {"a_run": {name: self.task}}


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(monkeypatch)


@pytest.fixture
def make(runs_uri: str, platform: Pretender) -> Callable[..., Attempt]:
    """Each call is a running job."""

    def job(key: str = "train-1", tracking: dict[str, Any] | None = None, **source: str) -> Attempt:
        runs = open_store(runs_uri)
        runs.create_json(f"{INDEX}/{key}", {"job_key": key})
        document = {"name": "job", "script": {"path": "/train.py"}, "tracking": tracking or {}}
        attempt = JobRun(runs, key).claim(TrainingJob.parse(document), after=0, source={**SOURCE, **source})
        attempt.supervisors.append(1, {"pid": 1})
        platform.alive.add(attempt.number)
        return attempt

    return job


def run(mlflow_conn_id: str | None = None) -> dict[str, Any]:
    operator = ReconcileJobsOperator(task_id="reconcile", mlflow_conn_id=mlflow_conn_id)
    context = context_of(operator)
    context["ti"].log_url = f"{HERE}/dags/mxdist_reconcile/runs/now/tasks/reconcile"
    return operator.execute(context)


@pytest.mark.parametrize(
    ("states", "reason"),
    [((None, None), "deleted"), (("running", "failed"), "task is failed"), (("failed", None), "run is over")],
    ids=["run deleted", "task failed", "run over"],
)
def test_job_that_nobody_wants_is_ended(
    make: Callable[..., Attempt], airflow: Answers, states: tuple[str | None, str | None], reason: str
) -> None:
    attempt = make()
    airflow.run, airflow.task = states
    told = run()
    intent, result = attempt.cancel_intent(), attempt.result()
    assert intent is not None
    assert (intent.by, intent.marked_success) == ("reconciler", False)
    assert reason in intent.reason
    assert result is not None
    assert result.state is JobState.CANCELLED
    assert told["problems"] == []
    assert "CANCELLED" in told["done"][0]
    assert run() == {"done": [], "problems": []}, "a second time changes nothing"


def test_mark_as_success_is_told(make: Callable[..., Attempt], airflow: Answers) -> None:
    attempt = make()
    airflow.task = "success"
    run()
    intent = attempt.cancel_intent()
    assert intent is not None
    assert intent.marked_success


def test_job_that_is_wanted_goes_on(make: Callable[..., Attempt], airflow: Answers) -> None:
    attempt = make()
    assert run() == {"done": [], "problems": []}
    assert attempt.cancel_intent() is None
    assert airflow.asked == [{"dag_id": "a_dag", "run_ids": ["a_run"]}]


def test_mapped_task_is_asked_for_by_its_index(make: Callable[..., Attempt], airflow: Answers) -> None:
    attempt = make(map_index="2")
    airflow.task = "failed"
    run()
    assert attempt.cancel_intent() is not None


def test_no_answer_is_no_reason_and_is_told(make: Callable[..., Attempt], airflow: Answers) -> None:
    attempt = make()
    airflow.run, airflow.broken = None, True
    with pytest.raises(AirflowException, match="train-1 attempt 1: nobody knows.*the API server restarts"):
        run()
    assert attempt.cancel_intent() is None


def test_jobs_of_another_airflow_are_left_alone(make: Callable[..., Attempt], airflow: Answers) -> None:
    attempt = make(url="http://another/dags/a_dag/runs")
    airflow.run = None
    run()
    assert attempt.cancel_intent() is None
    assert airflow.asked == []


def test_name_of_an_airflow_survives_a_new_address(
    make: Callable[..., Attempt], airflow: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    airflow.run = None
    ours = make("ours-1", url="http://the-old-address/dags/a_dag/runs", airflow="one")
    monkeypatch.setenv("MXDIST_AIRFLOW_ID", "another")
    run()
    monkeypatch.delenv("MXDIST_AIRFLOW_ID")
    run()
    assert ours.cancel_intent() is None
    monkeypatch.setenv("MXDIST_AIRFLOW_ID", "one")
    run()
    assert ours.cancel_intent() is not None


def test_same_address_is_not_the_same_airflow(
    make: Callable[..., Attempt], airflow: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    airflow.run = None
    named, nameless = make("named-1", airflow="one"), make("nameless-1")
    monkeypatch.setenv("MXDIST_AIRFLOW_ID", "another")
    run()
    assert (named.cancel_intent(), nameless.cancel_intent()) == (None, None)


def test_claim_names_the_airflow_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(ReconcileJobsOperator(task_id="reconcile"))
    monkeypatch.delenv("MXDIST_AIRFLOW_ID", raising=False)
    assert "airflow" not in source_of(context)
    monkeypatch.setenv("MXDIST_AIRFLOW_ID", "one")
    assert source_of(context)["airflow"] == "one"


def test_one_broken_job_keeps_no_other_waiting(make: Callable[..., Attempt], airflow: Answers, runs_uri: str) -> None:
    open_store(runs_uri).create_json(f"{INDEX}/a-broken-one", {})
    open_store(runs_uri).write("a-broken-one/attempts/0000000001.json", b"{")
    attempt = make()
    airflow.run = None
    told = run()
    assert attempt.cancel_intent() is not None
    assert "a-broken-one" in " ".join(told["problems"])


def test_cancel_whose_supervisor_died_is_carried_out(
    make: Callable[..., Attempt], airflow: Answers, platform: Pretender
) -> None:
    attempt = make()
    attempt.request_cancel("user", "enough")
    platform.alive.clear()
    run()
    result = attempt.result()
    assert result is not None
    assert result.state is JobState.CANCELLED
    assert airflow.asked == [], "somebody has decided already"


@pytest.fixture
def mlflow(mlflow_server: Mlflow, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    connection = {"conn_type": "mxdist_mlflow", "host": mlflow_server.url}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    return MlflowClient(mlflow_server.url)


@pytest.fixture
def tracked(make: Callable[..., Attempt], mlflow: MlflowClient, mlflow_server: Mlflow) -> tuple[Attempt, str, str]:
    """A job with its run and its parent run in MLflow: attempt, run id, parent's id."""
    name = f"reconcile-{time.time_ns()}"
    attempt = make(tracking={"uri": mlflow_server.url, "experiment": name, "parent": f"a_dag/{name}"})
    client, job = Client(mlflow_server.url), attempt.claim.parsed()
    parent = find_or_create_parent(client, attempt, job)
    return attempt, find_or_create_run(client, attempt, job).run_id, parent.run_id


def status(mlflow: MlflowClient, run_id: str) -> str:
    return str(mlflow.get_run(run_id).info.status)


@pytest.mark.parametrize(("state", "said"), [(None, "KILLED"), ("success", "FINISHED"), ("failed", "FAILED")], ids=str)
def test_parent_run_that_was_missed_is_closed(
    tracked: tuple[Attempt, str, str], airflow: Answers, mlflow: MlflowClient, state: str | None, said: str
) -> None:
    attempt, _, parent = tracked
    end(attempt)
    other = mlflow.create_run("0", tags={"mxdist.parent": f"of-another-store-{time.time_ns()}"}).info.run_id
    airflow.run = state
    assert run("mxdist_mlflow")["problems"] == []
    assert status(mlflow, parent) == said
    assert status(mlflow, other) == "RUNNING"


def test_parent_run_of_a_living_run_stays_open(
    tracked: tuple[Attempt, str, str], airflow: Answers, mlflow: MlflowClient
) -> None:
    attempt, _, parent = tracked
    end(attempt)
    run("mxdist_mlflow")
    assert status(mlflow, parent) == "RUNNING"


def test_deleted_run_is_closed_as_a_whole(
    tracked: tuple[Attempt, str, str], airflow: Answers, platform: Pretender, mlflow: MlflowClient
) -> None:
    attempt, run_id, parent = tracked
    airflow.run = None
    assert run("mxdist_mlflow")["problems"] == []
    assert (status(mlflow, run_id), status(mlflow, parent)) == ("KILLED", "KILLED")
    assert mlflow.get_run(run_id).data.tags["mxdist.state"] == "CANCELLED"
    assert platform.alive == set()


def test_run_that_was_closed_otherwise_than_its_job_ended_is_mended_once(
    tracked: tuple[Attempt, str, str], airflow: Answers, mlflow: MlflowClient
) -> None:
    attempt, run_id, _ = tracked
    delivered = Progress(run_id=run_id, closed="SUCCEEDED", complete=True)
    attempt.store.write_json("tracking.json", asdict(delivered))
    mlflow.set_terminated(run_id, "FINISHED")
    end(attempt, JobState.FAILED, Cause("killed", "rank 1 was killed"), tracking_complete=False)
    assert run("mxdist_mlflow")["done"] == ["train-1 attempt 1: MLflow has everything"]
    assert status(mlflow, run_id) == "FAILED"
    assert run("mxdist_mlflow")["done"] == [], "what is told already is not said again"


@pytest.mark.parametrize(
    ("states", "reason"),
    [((None, None), "deleted"), (("running", "failed"), "task is failed"), (("failed", None), "run is over")],
    ids=["run deleted", "task failed", "run over"],
)
def test_preempted_training_that_nobody_goes_on_with_is_closed(
    tracked: tuple[Attempt, str, str],
    airflow: Answers,
    mlflow: MlflowClient,
    states: tuple[str | None, str | None],
    reason: str,
) -> None:
    attempt, run_id, _ = tracked
    delivered = Progress(run_id=run_id, closed="PREEMPTED", complete=True)
    attempt.store.write_json("tracking.json", asdict(delivered))
    end(attempt, JobState.PREEMPTED, Cause("preempted", "the node went away", True))
    airflow.task = "up_for_retry"
    assert run("mxdist_mlflow") == {"done": [], "problems": []}
    assert status(mlflow, run_id) == "RUNNING", "its retry goes on in this run"
    airflow.run, airflow.task = states
    told = run("mxdist_mlflow")
    assert told["problems"] == []
    assert "nobody goes on" in told["done"][0]
    closed = mlflow.get_run(run_id)
    assert (closed.info.status, closed.data.tags["mxdist.state"]) == ("KILLED", "CANCELLED")
    assert "given-up: preempted" in closed.data.tags["mxdist.cause"]
    assert reason in closed.data.tags["mxdist.cause"]
    assert attempt.cancel_intent() is None, "a clear goes on from its checkpoint"
    assert run("mxdist_mlflow") == {"done": [], "problems": []}, "a second time changes nothing"


def test_mlflow_out_of_reach_is_told_and_ends_the_job_all_the_same(
    make: Callable[..., Attempt], airflow: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = {"conn_type": "mxdist_mlflow", "host": "http://127.0.0.1:9"}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    attempt = make(tracking={"uri": "http://127.0.0.1:9", "parent": "a_dag/a_run"})
    airflow.run = None
    told = run("mxdist_mlflow")
    assert attempt.result() is not None
    assert "did not answer" in " ".join(told["problems"])


def test_alias_that_mlflow_missed_is_moved(
    airflow: Answers, platform: Pretender, mlflow: MlflowClient, mlflow_server: Mlflow, runs_uri: str
) -> None:
    name = f"a model {time.time_ns()}"
    mlflow.create_registered_model(name)
    source = mlflow.create_run("0")
    mlflow.create_model_version(name, f"{source.info.artifact_uri}/model", run_id=source.info.run_id)
    runs = open_store(runs_uri)
    challenger = Candidate("1", Scores({"accuracy": 0.9}, "0" * 64, "2026-03-09"))
    Registry(runs, mlflow_server.url).promote(name, challenger, None, Rule())
    mlflow.delete_registered_model_alias(name, "champion")
    runs.write_json(f"promotions/{name.replace(' ', '%20')}/projected", {"number": 0, "version": None})
    assert run("mxdist_mlflow")["done"] == [f"model {name}: the alias is moved to the champion"]
    assert mlflow.get_model_version_by_alias(name, "champion").version == "1"
    assert run("mxdist_mlflow")["done"] == []


def test_never_takes_for_ever() -> None:
    bound = ReconcileJobsOperator(task_id="reconcile").execution_timeout
    assert bound is not None
    assert 0 < bound.total_seconds() <= 3600
