"""What an operator tells MLflow, and that nothing depends on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, TaskDeferred
from mlflow import MlflowClient
from unit.airflow.deferring import deferred
from unit.airflow.world import Pretender, context_of, end

from mxdist.operators.train import DistributedTrainOperator
from mxdist.spec import JobState
from mxdist.store import Attempt, Cause, State
from stack.mlflow import Mlflow


@pytest.fixture
def recording(
    make: Callable[..., Any], mlflow_server: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., DistributedTrainOperator]:
    """As ``make``, with runs in MLflow."""
    connection = {"conn_type": "mxdist_mlflow", "host": mlflow_server.url}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    experiment = f"operators-{time.time_ns()}"
    return lambda **fields: make(mlflow_conn_id="mxdist_mlflow", experiment=experiment, **fields)


KILLED = Cause("killed", "rank 1 was killed", rank=1, exit_code=-9)


@pytest.mark.parametrize(
    ("state", "cause", "status"),
    [
        (JobState.FAILED, KILLED, "FAILED"),
        (JobState.DEADLINE, Cause("deadline", "the deadline has passed"), "FAILED"),
        (JobState.CANCELLED, Cause("cancel", "cancelled by cli", retryable=False), "KILLED"),
    ],
    ids=lambda value: value.value if isinstance(value, JobState) else "",
)
def test_mlflow_is_told_of_an_end_that_it_missed(
    recording: Callable[[], Any],
    latest: Callable[[], Attempt],
    mlflow_server: Mlflow,
    state: JobState,
    cause: Cause,
    status: str,
) -> None:
    context = context_of(recording())
    deferred(recording(), context)
    url = context["ti"].xcoms["mxdist_mlflow_run_url"]
    mlflow = MlflowClient(mlflow_server.url)
    assert mlflow.get_run(url.rpartition("/")[2]).info.status == "RUNNING"
    end(latest(), state, cause, tracking_complete=False)
    with pytest.raises(AirflowException, match=cause.message):
        recording().execute_complete(context, {"attempt": 1, "status": "done", "state": state.value})
    run = mlflow.get_run(url.rpartition("/")[2])
    assert (run.info.status, run.data.tags["mxdist.state"]) == (status, state.value)
    assert run.data.tags["mxdist.cause"] == f"{cause.kind}: {cause.message}"


@pytest.mark.parametrize("away", ["down", "forgotten"])
def test_why_a_job_failed_is_told_even_if_mlflow_cannot_be(
    recording: Callable[[], Any], latest: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    context = context_of(recording())
    deferred(recording(), context)
    end(latest(), JobState.FAILED, KILLED, tracking_complete=False)
    if away == "down":
        connection = {"conn_type": "mxdist_mlflow", "host": "http://127.0.0.1:9"}
        monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    else:
        monkeypatch.delenv("AIRFLOW_CONN_MXDIST_MLFLOW")
    with pytest.raises(AirflowException, match="rank 1 was killed") as caught:
        recording().execute_complete(context, {"attempt": 1, "status": "done", "state": "FAILED"})
    assert type(caught.value) is AirflowException, "a retry may help"


@pytest.mark.parametrize("complete", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("connection", [None, {"conn_type": "mxdist_mlflow"}], ids=["deleted", "without a host"])
def test_trained_model_counts_whatever_became_of_the_connection(
    recording: Callable[..., Any],
    latest: Callable[[], Attempt],
    monkeypatch: pytest.MonkeyPatch,
    connection: dict[str, str] | None,
    complete: bool,
) -> None:
    context = context_of(recording())
    deferred(recording(), context)
    run = {"mlflow_run_id": "r1", "mlflow_run_url": "http://mlflow/#/run/r1"}
    end(latest(), JobState.SUCCEEDED, tracking_complete=complete, **run)
    if connection is None:
        monkeypatch.delenv("AIRFLOW_CONN_MXDIST_MLFLOW")
    else:
        monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    operator = recording(registered_model="digits")
    handed = operator.execute_complete(context, {"attempt": 1, "status": "done", "state": "SUCCEEDED"})
    assert handed["state"] == "SUCCEEDED"
    assert {name: handed[name] for name in run} == run


def test_job_is_waited_for_whatever_became_of_the_connection(
    recording: Callable[..., Any], latest: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(recording())
    deferred(recording(), context)
    monkeypatch.delenv("AIRFLOW_CONN_MXDIST_MLFLOW")
    with pytest.raises(TaskDeferred):
        recording().execute_complete(context, {"attempt": 1, "status": "tracked", "chunk": 0, "line": 0})


def test_lost_supervisor_is_started_again_whatever_became_of_the_connection(
    recording: Callable[..., Any], platform: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(recording())
    deferred(recording(), context)
    monkeypatch.delenv("AIRFLOW_CONN_MXDIST_MLFLOW")
    platform.alive.clear()
    with pytest.raises(TaskDeferred):
        recording().execute_complete(context, {"attempt": 1, "status": "lost", "chunk": 0, "line": 0})
    assert platform.started == [(1, 1), (1, 2)]


def test_nothing_is_sent_twice_of_a_failure_that_mlflow_knows(
    recording: Callable[[], Any], latest: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(recording())
    deferred(recording(), context)
    end(latest(), JobState.FAILED, KILLED, tracking_complete=True)
    monkeypatch.setattr("mxdist.tracking.replay.replay", lambda *_, **__: pytest.fail("it was asked to"))
    with pytest.raises(AirflowException, match="rank 1 was killed"):
        recording().execute_complete(context, {"attempt": 1, "status": "done", "state": "FAILED"})


def test_link_appears_when_the_trigger_has_seen_the_run(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    context = context_of(make())
    deferred(make(), context)
    latest().write_state(State(state=JobState.RUNNING, mlflow_run_url="http://mlflow/#/run"))
    with pytest.raises(TaskDeferred) as caught:
        make().execute_complete(context, {"attempt": 1, "status": "tracked", "chunk": 0, "line": 0})
    assert context["ti"].xcoms["mxdist_mlflow_run_url"] == "http://mlflow/#/run"
    assert caught.value.trigger.serialize()[1]["await_run"] is False


def test_mlflow_out_of_reach_does_not_stop_a_submission(
    make: Callable[..., Any], platform: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = {"conn_type": "mxdist_mlflow", "host": "http://127.0.0.1:9"}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    operator = make(mlflow_conn_id="mxdist_mlflow")
    waits = deferred(operator, context_of(operator))
    assert waits["await_run"] is True
    assert platform.started == [(1, 1)]
