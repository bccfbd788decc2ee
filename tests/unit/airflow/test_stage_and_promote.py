"""The operators around a training: stage, evaluate, promote."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from mlflow import MlflowClient
from unit.airflow.world import Pretender, context_of, end

from mxdist.hooks.cluster import ClusterHook
from mxdist.launch.client import JobClient
from mxdist.operators.evaluate import EvaluateModelOperator
from mxdist.operators.promote import PromoteModelOperator
from mxdist.operators.stage import StageDatasetOperator
from mxdist.operators.train import DistributedTrainOperator
from mxdist.store import open_store
from stack.mlflow import Mlflow
from stack.seaweed import Seaweed

WEEK_END = datetime(2026, 3, 9, 3, tzinfo=UTC)
DATASET = {
    "manifest_uri": "s3://bbb/data/set/manifests/v.json",
    "version": "0" * 64,
    "as_of": "2026-03-09T03:00:00+00:00",
}


@pytest.fixture
def mlflow(mlflow_server: Mlflow, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    connection = {"conn_type": "mxdist_mlflow", "host": mlflow_server.url}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    return MlflowClient(mlflow_server.url)


@pytest.fixture
def model(mlflow: MlflowClient, request: pytest.FixtureRequest) -> str:
    """A registered model with two versions."""
    name = f"model-{request.node.name}"
    mlflow.create_registered_model(name)
    for _ in range(2):
        run = mlflow.create_run("0")
        mlflow.create_model_version(name, f"{run.info.artifact_uri}/model", run_id=run.info.run_id)
    return name


def evaluation(
    model: str,
    version: str | None,
    accuracy: float,
    champion: tuple[str, float] | None = None,
    dataset: dict[str, str] = DATASET,
) -> dict[str, Any]:
    scores = {"challenger": {"accuracy": accuracy}}
    if champion:
        scores["champion"] = {"accuracy": champion[1]}
    return {
        "registered_model": model,
        "dataset_version": "0" * 64,
        "scores": scores,
        "champion": {"version": champion[0]} if champion else None,
        "challenger": {
            "job_key": None,
            "attempt": 1,
            "registered_version": version,
            "mlflow_run_id": "run",
            "model_uri": f"s3://bbb/{version}",
            "model_digest": "d",
            "dataset": dataset,
        },
    }


def promote(**fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    operator = PromoteModelOperator(task_id="promote", **fields)
    context = context_of(operator)
    return operator.execute(context), context["ti"].xcoms


def test_stages_a_folder_beside_nothing(runs_uri: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("a")
    fields: dict[str, Any] = {"task_id": "stage", "source": str(source), "dataset_name": "letters"}
    context = context_of(StageDatasetOperator(**fields), data_interval_end=WEEK_END)
    first = StageDatasetOperator(**fields).execute(context)
    assert (first["files"], first["uploaded_files"]) == (1, 1)
    assert datetime.fromisoformat(first["as_of"]) == WEEK_END
    again = StageDatasetOperator(**fields).execute(context)
    assert (again["uploaded_files"], again["version"]) == (0, first["version"])


def test_staging_nothing_fails_for_good_and_publishes_nothing(runs_uri: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    operator = StageDatasetOperator(task_id="stage", source=str(tmp_path / "empty"), dataset_name="letters")
    with pytest.raises(AirflowFailException, match="no files"):
        operator.execute(context_of(operator))
    assert list(open_store(str(tmp_path / "data")).list()) == []


def test_first_model_becomes_champion(runs_uri: str, mlflow: MlflowClient, model: str) -> None:
    result, xcoms = promote(evaluation=evaluation(model, "1", 0.9))
    assert (result["decision"], result["champion"], result["previous"]) == ("promoted", "1", None)
    assert mlflow.get_model_version_by_alias(model, "champion").version == "1"
    assert xcoms["mxdist_mlflow_model_url"].endswith(f"/#/models/{model}/versions/1")
    assert len(json.dumps(result)) < 4000


def test_equal_model_is_refused_and_the_task_succeeds(runs_uri: str, mlflow: MlflowClient, model: str) -> None:
    promote(evaluation=evaluation(model, "1", 0.9))
    result, _ = promote(evaluation=evaluation(model, "2", 0.9, champion=("1", 0.9)), margin="0.01")
    assert (result["decision"], result["champion"], result["version"]) == ("kept champion", "1", "2")
    assert (result["numbers"]["challenger"], result["numbers"]["champion"]) == (0.9, 0.9)
    assert mlflow.get_model_version_by_alias(model, "champion").version == "1"


def test_better_model_of_the_same_data_is_promoted_whichever_run_staged_them(
    runs_uri: str, mlflow: MlflowClient, model: str
) -> None:
    now, last_week = {**DATASET, "as_of": "2026-03-11T12:00:00+00:00"}, DATASET
    promote(evaluation=evaluation(model, "1", 0.9, dataset=now))
    result, _ = promote(evaluation=evaluation(model, "2", 0.95, champion=("1", 0.9), dataset=last_week))
    assert (result["decision"], result["champion"]) == ("promoted", "2")


def test_backfill_of_older_data_is_refused(runs_uri: str, mlflow: MlflowClient, model: str) -> None:
    promote(evaluation=evaluation(model, "1", 0.9))
    older = {**DATASET, "version": "1" * 64, "as_of": "2026-03-02T03:00:00+00:00"}
    result, _ = promote(evaluation=evaluation(model, "2", 0.95, champion=("1", 0.9), dataset=older))
    assert result["decision"] == "kept champion"
    assert "older data (as of 2026-03-02" in result["reason"]


def test_force_is_recorded(runs_uri: str, mlflow: MlflowClient, model: str) -> None:
    promote(evaluation=evaluation(model, "1", 0.9))
    result, _ = promote(evaluation=evaluation(model, "2", 0.1, champion=("1", 0.9)), force="true")
    assert (result["decision"], result["forced"], result["champion"]) == ("promoted", True, "2")


def test_promoting_twice_changes_nothing(runs_uri: str, mlflow: MlflowClient, model: str) -> None:
    for _ in range(2):
        result, _ = promote(evaluation=evaluation(model, "1", 0.9))
        assert (result["decision"], result["champion"]) == ("promoted", "1")


@pytest.mark.parametrize(
    "fields", [{"margin": "much"}, {"margin": "-1"}, {"force": "perhaps"}], ids=["text", "negative", "no truth value"]
)
def test_wrong_rule_is_named(runs_uri: str, mlflow: MlflowClient, model: str, fields: dict[str, str]) -> None:
    with pytest.raises(AirflowFailException, match=next(iter(fields))):
        promote(evaluation=evaluation(model, "1", 0.9), **fields)


@pytest.mark.parametrize(
    "given", [{**evaluation("", "1", 0.9)}, {**evaluation("x", "1", 0.9), "registered_model": None}]
)
def test_model_without_a_name_is_refused_before_anything_is_asked(given: dict[str, Any]) -> None:
    """No connection is there: asking any service would fail otherwise."""
    with pytest.raises(AirflowFailException, match=r"registered_model: is required"):
        promote(evaluation=given)


def test_name_that_mlflow_refuses_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(AirflowFailException, match=r"registered_model: 'a/b' has a / or a :"):
        promote(evaluation=evaluation("a/b", "1", 0.9))


def test_promotion_of_what_is_no_evaluation_is_refused() -> None:
    with pytest.raises(AirflowFailException, match=r"evaluation: must be what EvaluateModelOperator returned, not str"):
        promote(evaluation="s3://bucket/model")


def test_mlflow_down_at_promote_may_be_retried(runs_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = {"conn_type": "mxdist_mlflow", "host": "http://127.0.0.1:9"}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    with pytest.raises(AirflowException, match="did not answer") as caught:
        promote(evaluation=evaluation("any", "1", 0.9))
    assert type(caught.value) is AirflowException
    assert list(open_store(runs_uri).list("promotions/")) == []


def test_wrong_mlflow_password_at_promote_fails_for_good_with_one_message(
    runs_uri: str, secured_mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"conn_type": "mxdist_mlflow", "host": secured_mlflow.url, "login": "admin", "password": "wrong-secret"}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(wrong))
    with pytest.raises(AirflowFailException) as caught:
        promote(evaluation=evaluation("any", "1", 0.9))
    said = "refused the login. Check the user name and the password or token of the MLflow connection."
    assert str(caught.value) == f"MLflow at {secured_mlflow.url} {said}"
    assert list(open_store(runs_uri).list("promotions/")) == []


def on_s3(monkeypatch: pytest.MonkeyPatch, bucket: str, endpoint_url: str, secret: str) -> None:
    """Lead the connection to this S3 server."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    extra = {"runs_uri": f"s3://{bucket}/runs", "data_uri": f"s3://{bucket}/data", "endpoint_url": endpoint_url}
    extra |= {"node_python": "/bin/false", "workdir": "/tmp"}
    connection = {"conn_type": "mxdist", "login": "mxdist-test", "password": secret, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_DEFAULT", json.dumps(connection))


@pytest.fixture(params=["stage", "train", "evaluate", "promote"])
def task(request: pytest.FixtureRequest, tmp_path: Path, script: str, model: str) -> Callable[[], Any]:
    """A task that needs S3, ready to be run."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_text("a")
    trained = {"model_uri": "s3://bbb/2", "registered_model": model, "registered_version": "2", "dataset": DATASET}
    makers: dict[str, Callable[[], Any]] = {
        "stage": lambda: StageDatasetOperator(task_id="stage", source=str(tmp_path / "source"), dataset_name="letters"),
        "train": lambda: DistributedTrainOperator(task_id="train", script=script, mlflow_conn_id=None),
        "evaluate": lambda: EvaluateModelOperator(task_id="evaluate", challenger=trained),
        "promote": lambda: PromoteModelOperator(task_id="promote", evaluation=evaluation(model, "1", 0.9)),
    }

    def run() -> Any:
        operator = makers[request.param]()
        return operator.execute(context_of(operator))

    return run


def test_refused_s3_key_fails_for_good(
    task: Callable[[], Any], seaweed: Seaweed, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_s3(monkeypatch, bucket, seaweed.endpoint_url, "wrong-secret")
    with pytest.raises(AirflowFailException, match="refused the credentials") as caught:
        task()
    assert len(str(caught.value).splitlines()) == 1
    assert "wrong-secret" not in str(caught.value)


def test_s3_down_may_be_retried(task: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_s3(monkeypatch, "bbb", "http://127.0.0.1:9", "secret")
    with pytest.raises(AirflowException, match=r"http://127.0.0.1:9 did not answer") as caught:
        task()
    assert type(caught.value) is AirflowException
    assert len(str(caught.value).splitlines()) == 1


def test_evaluation_meets_the_champion_of_its_submission(
    runs_uri: str, mlflow: MlflowClient, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Pretender()

    def job_client(self: ClusterHook, runs: str | None = None) -> JobClient:
        return JobClient(open_store(runs_uri), launcher)

    monkeypatch.setattr(ClusterHook, "job_client", job_client)
    promote(evaluation=evaluation(model, "1", 0.9))
    trained = {
        "model_uri": "s3://bbb/2",
        "registered_model": model,
        "registered_version": "2",
        "dataset": DATASET,
        "labels": [5, 6],
    }
    operator = EvaluateModelOperator(task_id="evaluate", challenger=trained)
    context = context_of(operator)
    with pytest.raises(TaskDeferred):
        operator.execute(context)
    client = JobClient(open_store(runs_uri), launcher)
    attempt = client.attempt(client.job_keys()[0])
    assert attempt.claim.job["models"] == {"challenger": "s3://bbb/2", "champion": "s3://bbb/1"}
    assert attempt.claim.job["dataset"]["labels"] == [5, 6]

    promote(evaluation=evaluation(model, "2", 0.95, champion=("1", 0.9)))  # somebody else, meanwhile
    per_label = {str(label): {"count": 1} for label in range(5000)}
    scores = {role: {"accuracy": 0.9, "count": 700, "per_label": per_label} for role in ("challenger", "champion")}
    end(attempt, outputs={"scores": scores})
    resumed = EvaluateModelOperator(task_id="evaluate", challenger=trained)
    result = resumed.execute_complete(context, {"attempt": 1, "status": "done"})
    assert result["champion"] == {"version": "1"}
    assert result["scores"]["challenger"] == {"accuracy": 0.9, "count": 700}
    assert result["challenger"]["dataset"] == DATASET
    assert len(json.dumps(result)) < 4000
    again, _ = promote(evaluation=result)
    assert (again["decision"], again["champion"]) == ("promoted", "2")  # it is the champion already
