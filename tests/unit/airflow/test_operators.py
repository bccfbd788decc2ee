"""What an operator does over the tries of a task: submit once, reconnect, start again, say why it failed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from unit.airflow.deferring import deferred
from unit.airflow.world import RUN_START, Pretender, context_of, end

from mxdist.launch.client import JobClient
from mxdist.operators.base import JOB_PLACE, job_name
from mxdist.operators.train import DistributedTrainOperator, FineTuneOperator
from mxdist.spec import JobState
from mxdist.store import Attempt, Cause, Result, open_store

STAGED = {"manifest_uri": "s3://bucket/data/set/manifests/v.json", "version": "0" * 64, "as_of": "2026-03-02"}


def test_submits_then_waits_without_a_worker(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt], runs_uri: str
) -> None:
    operator = make()
    context = context_of(operator)
    waits = deferred(operator, context)
    attempt = latest()
    assert platform.started == [(1, 1)]
    assert (waits["job_key"], waits["attempt"], waits["runs_uri"]) == (attempt.claim.job_key, 1, runs_uri)
    assert attempt.claim.source["dag_id"] == "a_dag"
    assert attempt.claim.source["url"] == "http://airflow/dags/a_dag/log"
    assert context["ti"].xcoms[JOB_PLACE]["job_key"] == attempt.claim.job_key
    assert context["task_state_store"].get(JOB_PLACE) == context["ti"].xcoms[JOB_PLACE]


def test_retry_begins_no_second_job_while_the_share_is_away(
    make: Callable[..., Any], platform: Pretender, runs_uri: str
) -> None:
    operator = make()
    context = context_of(operator)
    first = deferred(operator, context)
    runs, share = Path(runs_uri), Path(f"{runs_uri}-share")
    runs.rename(share)
    runs.mkdir()
    retry = {**context_of(make(), try_number=2), "task_state_store": context["task_state_store"]}
    with pytest.raises(AirflowException, match="holds no job.*is that mounted") as caught:
        make().execute(retry)
    assert not isinstance(caught.value, AirflowFailException), "the next retry may find it again"
    assert list(runs.iterdir()) == []
    runs.rmdir()
    share.rename(runs)
    assert deferred(make(), retry) == first
    assert platform.started == [(1, 1)]


def test_retry_reconnects_to_a_running_job(make: Callable[..., Any], platform: Pretender) -> None:
    first = deferred(make(), context_of(make(), try_number=1))
    second = deferred(make(), context_of(make(), try_number=2))
    assert first == second
    assert platform.started == [(1, 1)]


def test_retry_starts_the_supervisor_of_a_job_that_was_claimed_only(
    make: Callable[..., Any], platform: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> bool:
        raise SystemExit(137)

    with monkeypatch.context() as patch:
        patch.setattr(Pretender, "start", killed)
        with pytest.raises(SystemExit):
            make().execute(context_of(make()))
    deferred(make(), context_of(make(), try_number=2))
    assert platform.started == [(1, 1)]


def test_retry_takes_the_result_of_a_finished_job(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    deferred(make(), context_of(make()))
    end(latest(), metrics={"accuracy": 0.97})
    for try_number in (2, 3):  # try 2 was killed after it had the result, before Airflow knew
        result = make().execute(context_of(make(), try_number=try_number))
        assert (result["state"], result["attempt"], result["metrics"]) == ("SUCCEEDED", 1, {"accuracy": 0.97})
    assert platform.started == [(1, 1)]


@pytest.mark.parametrize(
    "cleared",
    [{"max_tries": 2}, {"start": RUN_START.replace(hour=4)}],
    ids=["in a running run", "in a run that had ended"],
)
def test_clear_of_a_finished_task_starts_again(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt], cleared: dict[str, Any]
) -> None:
    deferred(make(), context_of(make()))
    end(latest())
    assert deferred(make(), context_of(make(), try_number=2, **cleared))["attempt"] == 2
    assert platform.started == [(1, 1), (2, 1)]
    assert latest().claim.origin == 2


def test_clear_of_a_running_task_ends_the_old_job_first(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    deferred(make(), context_of(make()))
    old = latest()
    assert deferred(make(), context_of(make(), try_number=2, max_tries=2))["attempt"] == 2
    result = old.result()
    assert result is not None
    assert result.state is JobState.CANCELLED
    assert platform.alive == {2}
    assert latest().claim.origin == 2


def test_clear_often_leaves_one_live_job_and_it_is_the_newest(make: Callable[..., Any], platform: Pretender) -> None:
    for clear in range(20):
        deferred(make(), context_of(make(), try_number=clear + 1, max_tries=clear + 1))
    assert platform.alive == {20}


def test_failed_training_goes_on_from_its_checkpoints(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    deferred(make(), context_of(make()))
    end(latest(), JobState.FAILED, Cause("rank_exit", "rank 1 was killed", rank=1, exit_code=-9))
    assert deferred(make(), context_of(make(), try_number=2))["attempt"] == 2
    assert latest().claim.origin == 1


def test_every_map_index_has_its_own_job(make: Callable[..., Any], platform: Pretender) -> None:
    keys = {deferred(make(), context_of(make(), map_index=index))["job_key"] for index in (-1, 0, 1, 2)}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("state", "cause", "kind", "words"),
    [
        (
            JobState.FAILED,
            Cause("rank_exit", "rank 1 was killed", rank=1, host="node-b", exit_code=-9),
            AirflowException,
            ["rank 1", "node-b", "signal 9", "s3://logs"],
        ),
        (
            JobState.FAILED,
            Cause("user_error", "ValueError: no", retryable=False, rank=0, exit_code=81),
            AirflowFailException,
            ["rank 0", "exit code 81", "ValueError: no", "s3://logs"],
        ),
        (JobState.FAILED, Cause("nonfinite", "loss is nan", retryable=False), AirflowFailException, ["loss is nan"]),
        (JobState.FAILED, Cause("stall", "rank 1 stands still", rank=1), AirflowException, ["rank 1 stands still"]),
        (JobState.DEADLINE, Cause("deadline", "the deadline has passed"), AirflowFailException, ["deadline"]),
        (JobState.CANCELLED, Cause("cancel", "cancelled by cli", retryable=False), AirflowFailException, ["by cli"]),
        (JobState.PREEMPTED, Cause("preempted", "told to stop"), AirflowException, ["told to stop"]),
        (JobState.FAILED, None, AirflowException, ["FAILED"]),
    ],
    ids=["killed rank", "user error", "nan", "stall", "deadline", "cancelled", "preempted", "no cause"],
)
def test_failures_say_who_and_where_and_whether_to_retry(
    make: Callable[..., Any],
    latest: Callable[[], Attempt],
    state: JobState,
    cause: Cause | None,
    kind: type[Exception],
    words: list[str],
) -> None:
    context = context_of(make())
    deferred(make(), context)
    end(latest(), state, cause, log_uri="s3://logs")
    with pytest.raises(AirflowException) as caught:
        make().execute_complete(context, {"attempt": 1, "status": "done", "state": state.value})
    assert type(caught.value) is kind
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_wrong_fields_are_all_named_before_anything_starts(
    make: Callable[..., Any], platform: Pretender, runs_uri: str
) -> None:
    wrong = make(epochs="many", world_size="0", learning_rate="-1", limits={"deadlin_s": 5})
    with pytest.raises(AirflowFailException) as caught:
        wrong.execute(context_of(wrong))
    for path in ("epochs", "parallelism.world_size", "optimizer.learning_rate", "limits.deadlin_s", "deadline_s"):
        assert path in str(caught.value)
    assert platform.started == []
    assert JobClient(open_store(runs_uri), platform).job_keys() == []


def test_missing_connection_is_told(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, runs_uri: str) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_MXDIST_DEFAULT")
    with pytest.raises(AirflowFailException, match=r"mxdist_default.*Create the connection"):
        make().execute(context_of(make()))


def test_text_from_templates_is_cast(platform: Pretender, latest: Callable[[], Attempt]) -> None:
    operator = DistributedTrainOperator(
        task_id="t", model="lenet", dataset=STAGED, epochs="3", batch_size="32", world_size="2", learning_rate="0.1",
        seed="7", mlflow_conn_id=None,
    )  # fmt: skip
    deferred(operator, context_of(operator))
    job = latest().claim.job
    assert (job["epochs"], job["batch_size"], job["parallelism"]["world_size"], job["seed"]) == (3, 32, 2, 7)
    assert job["optimizer"]["learning_rate"] == 0.1
    assert job["dataset"] == {"manifest_uri": STAGED["manifest_uri"], "version": STAGED["version"], "labels": None}


def test_fine_tuning_takes_model_data_and_labels_from_upstream(
    platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    upstream = {
        "model_uri": "s3://bucket/runs/pretrain/0000000001/model",
        "model": {"name": "lenet", "params": {}},
        "dataset": STAGED,
        "labels": [0, 1],
    }
    operator = FineTuneOperator(task_id="tune", init_from=upstream, freeze_backbone="true", mlflow_conn_id=None)
    context = context_of(operator)
    deferred(operator, context)
    job = latest().claim.job
    assert job["init"]["model_uri"] == upstream["model_uri"]
    assert job["init"]["freeze_backbone"] is True
    assert (job["model"]["name"], job["dataset"]["labels"]) == ("lenet", [0, 1])
    end(latest())
    resumed = FineTuneOperator(task_id="tune", init_from=upstream, freeze_backbone="true", mlflow_conn_id=None)
    result = resumed.execute_complete(context, {"attempt": 1, "status": "done"})
    assert (result["dataset"], result["labels"]) == (STAGED, [0, 1])


def test_fine_tuning_without_a_model_upstream_is_refused(platform: Pretender) -> None:
    operator = FineTuneOperator(task_id="tune", init_from={"model_uri": None}, dataset=STAGED, mlflow_conn_id=None)
    with pytest.raises(AirflowFailException, match="returned no model: was it skipped, or marked as success"):
        operator.execute(context_of(operator))


def test_secrets_travel_to_the_launcher_and_nowhere_else(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    operator = make()
    context = context_of(operator)
    waits = deferred(operator, context)
    assert platform.secrets == [{"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "canary-secret"}]
    assert "canary-secret" not in json.dumps([waits, context["ti"].xcoms, latest().claim.dump()])
    rendered = {name: getattr(operator, name) for name in operator.template_fields}
    assert "canary-secret" not in json.dumps(rendered)


def test_huge_results_stay_small_in_xcom(make: Callable[..., Any], latest: Callable[[], Attempt]) -> None:
    context = context_of(make())
    deferred(make(), context)
    end(latest(), metrics={f"metric_{number:07}": float(number) for number in range(100_000)})
    result = make().execute_complete(context, {"attempt": 1, "status": "done"})
    assert len(json.dumps(result)) < 48_000


def _killed_while_starting(operator: Any, state: str | Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit; while the job is started the task gets its SIGTERM, and Airflow says ``state`` of it; "": it is gone."""
    real = Pretender.start

    def interrupted(self: Pretender, *args: Any, **kwargs: Any) -> bool:
        operator.on_kill()
        return real(self, *args, **kwargs)

    def told(*_: object) -> list[str | None]:
        if isinstance(state, Exception):
            raise state
        return [] if state == "" else [state]

    monkeypatch.setattr(Pretender, "start", interrupted)
    monkeypatch.setattr("mxdist.triggers.asking._states", told)
    deferred(operator, context_of(operator))


@pytest.mark.parametrize("state", ["failed", "success", "restarting", ""])
def test_kill_of_a_task_that_was_ended_while_submitting_ends_the_job(
    state: str,
    make: Callable[..., Any],
    platform: Pretender,
    latest: Callable[[], Attempt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _killed_while_starting(make(), state, monkeypatch)
    result = latest().result()
    assert result is not None
    assert result.state is JobState.CANCELLED
    assert platform.alive == set()


@pytest.mark.parametrize("state", ["running", "up_for_retry", "queued", None, OSError("ending")])
def test_job_outlives_a_worker_that_is_shut_down(
    state: str | Exception | None,
    make: Callable[..., Any],
    platform: Pretender,
    latest: Callable[[], Attempt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _killed_while_starting(make(), state, monkeypatch)
    assert latest().cancel_intent() is None
    assert platform.alive != set()


def test_kill_before_anything_was_submitted_does_nothing(make: Callable[..., Any], platform: Pretender) -> None:
    make().on_kill()
    assert platform.started == []


def test_lost_supervisor_is_started_again(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    context = context_of(make())
    deferred(make(), context)
    platform.alive.clear()
    with pytest.raises(TaskDeferred) as caught:
        make().execute_complete(context, {"attempt": 1, "status": "lost", "chunk": 3, "line": 40})
    assert platform.started == [(1, 1), (1, 2)]
    kwargs = caught.value.trigger.serialize()[1]
    assert (kwargs["attempt"], kwargs["chunk"], kwargs["line"]) == (1, 3, 40)


def test_job_on_a_share_that_is_not_mounted_may_be_tried_again(
    make: Callable[..., Any], platform: Pretender, runs_uri: str
) -> None:
    context = context_of(make())
    deferred(make(), context)
    Path(runs_uri).rename(f"{runs_uri}-share")
    Path(runs_uri).mkdir()
    with pytest.raises(AirflowException, match="is that mounted") as caught:
        make().execute_complete(context, {"attempt": 1, "status": "lost", "chunk": 0, "line": 0})
    assert type(caught.value) is AirflowException


def test_news_of_an_earlier_attempt_is_not_this_trys(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    context = context_of(make())
    deferred(make(), context)
    first = latest()
    first.request_cancel("user", "cleared")
    first.finish(Result(state=JobState.CANCELLED, ended_at=2.0))
    deferred(make(), context)
    assert latest().number == 2
    with pytest.raises(TaskDeferred) as caught:
        make().execute_complete(context, {"attempt": 1, "status": "done", "state": "CANCELLED"})
    assert caught.value.trigger.serialize()[1]["attempt"] == 2


def test_lost_too_often_fails_and_may_be_retried(
    make: Callable[..., Any], platform: Pretender, latest: Callable[[], Attempt]
) -> None:
    context = context_of(make(limits={"max_restarts": 0}))
    deferred(make(limits={"max_restarts": 0}), context)

    def lost_again_and_again() -> None:
        for _ in range(5):
            platform.alive.clear()
            with contextlib.suppress(TaskDeferred):
                make().execute_complete(context, {"attempt": 1, "status": "lost", "chunk": 0, "line": 0})

    with pytest.raises(AirflowException, match="no restart is left") as caught:
        lost_again_and_again()
    assert type(caught.value) is AirflowException


def test_unwatchable_job_fails_and_may_be_retried(make: Callable[..., Any], platform: Pretender) -> None:
    context = context_of(make())
    deferred(make(), context)
    with pytest.raises(AirflowException, match="the server refused") as caught:
        make().execute_complete(context, {"attempt": 1, "status": "failed", "message": "the server refused"})
    assert type(caught.value) is AirflowException


@pytest.mark.parametrize(
    ("task_id", "name"),
    [("train", "train"), ("group.Train_it", "group-train-it"), ("x" * 80, "x" * 52), ("___", "job")],
    ids=["plain", "in a group", "long", "nothing left"],
)
def test_job_is_named_after_the_task(task_id: str, name: str) -> None:
    assert job_name(task_id) == name
