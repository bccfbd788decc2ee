"""A run's configuration may name only parameters of the DAG; a typing mistake must not train with the defaults."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, Param
from airflow.sdk.exceptions import AirflowFailException
from unit.airflow.world import context_of

from mxdist.errors import SpecError
from mxdist.operators.conf import check_conf
from mxdist.operators.early import task_problems
from mxdist.operators.evaluate import EvaluateModelOperator
from mxdist.operators.promote import PromoteModelOperator
from mxdist.operators.stage import StageDatasetOperator
from mxdist.operators.train import DistributedTrainOperator, FineTuneOperator
from support.places import REPOSITORY

PARAMS = {"pretrain_epochs": Param(4, type="integer"), "seed": 0}


def context(operator: Any, conf: Any, params: dict[str, Any] | None = None) -> Any:
    found = context_of(operator, conf=conf)
    found["dag"] = operator.get_dag() or DAG("a_dag", params=PARAMS if params is None else params)
    return found


def train(**more: Any) -> DistributedTrainOperator:
    dataset = {"manifest_uri": "s3://b/data/set/manifests/v.json", "version": "0" * 64}
    return DistributedTrainOperator(task_id="train", model="lenet", dataset=dataset, **more)


def stage(tmp_path: Path, **more: Any) -> StageDatasetOperator:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a.txt").write_text("a")
    return StageDatasetOperator(task_id="stage", source=str(tmp_path / "source"), dataset_name="set", **more)


@pytest.mark.parametrize("conf", [None, {}, {"seed": 1}, {"openlineage": {"parent": "x"}, "seed": 1}], ids=str)
def test_known_names_are_taken(conf: Any) -> None:
    check_conf(context(train(), conf))


def test_a_dag_without_parameters_takes_any_name() -> None:
    check_conf(context(train(), {"anything": 1}, params={}))


def test_parameters_of_a_task_are_known() -> None:
    with DAG("a_dag", params=PARAMS):
        operator = train(params={"mine": 1})
    check_conf(context(operator, {"mine": 2, "seed": 1}))


def test_every_unknown_name_is_told() -> None:
    with pytest.raises(SpecError) as told:
        check_conf(context(train(), {"pretrain_epoch": 1, "zzz": 2, "seed": 3}))
    assert str(told.value) == (
        "The configuration of this run of a_dag has 2 problems:\n"
        "  pretrain_epoch: the DAG has no such parameter; did you mean 'pretrain_epochs'?\n"
        "  zzz: the DAG has no such parameter; it has pretrain_epochs, seed."
    )


def test_first_task_fails_for_good(runs_uri: str, tmp_path: Path) -> None:
    operator = stage(tmp_path)
    with pytest.raises(AirflowFailException, match="did you mean 'pretrain_epochs'"):
        operator.execute(context(operator, {"pretrain_epoch": 1}))
    with pytest.raises(AirflowFailException, match="did you mean 'pretrain_epochs'"):
        train().execute(context(train(), {"pretrain_epoch": 1}))


def test_an_argument_turns_it_off(runs_uri: str, tmp_path: Path) -> None:
    operator = stage(tmp_path, check_conf=False)
    assert operator.execute(context(operator, {"pretrain_epoch": 1}))["files"] == 1


def run_of(dag: DAG, task_id: str, conf: dict[str, Any]) -> Any:
    found = context_of(dag.get_task(task_id), conf=conf)
    return {**found, "dag": dag}


@pytest.fixture
def mnist(runs_uri: str) -> DAG:
    """The example DAG."""
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(REPOSITORY / "dags/mnist_retrain.py")
    assert not bag.import_errors
    return bag.dags["mnist_retrain"]


def test_first_task_of_the_example_takes_its_defaults(mnist: DAG) -> None:
    check_conf(run_of(mnist, "stage", {}))


def test_first_task_tells_every_wrong_field_of_every_task(mnist: DAG) -> None:
    conf = {"batch_size": 30, "world_size": 4, "zzz": 1}
    with pytest.raises(SpecError) as told:
        check_conf(run_of(mnist, "stage", conf))
    assert [(problem.path, problem.message) for problem in told.value.problems] == [
        ("zzz", f"the DAG has no such parameter; it has {', '.join(sorted(mnist.params))}."),
        (
            "batch_size of pretrain, transfer, finetune",
            "30 is not divisible by parallelism.world_size 4; use 28 or 32",
        ),
    ]


def test_later_tasks_leave_the_others_alone(mnist: DAG) -> None:
    check_conf(run_of(mnist, "evaluate", {"batch_size": 30, "world_size": 4}))


def test_nothing_is_staged_when_a_job_cannot_run(mnist: DAG, runs_uri: str, tmp_path: Path) -> None:
    task = mnist.get_task("stage").prepare_for_execution()
    with pytest.raises(AirflowFailException, match="batch_size of pretrain, transfer, finetune"):
        task.execute(run_of(mnist, "stage", {"batch_size": 30, "world_size": 4}))
    assert not list((tmp_path / "data").rglob("*"))


def wrong_dag(**fields: Any) -> DAG:
    with DAG("a_dag", params={"size": 3}) as dag:
        first = StageDatasetOperator(task_id="stage", source="mnist5k", dataset_name="set")
        trained = DistributedTrainOperator(task_id="train", model="lenet", dataset=first.output, **fields)
        FineTuneOperator(task_id="tune", init_from=trained.output, epochs=0)
        evaluated = EvaluateModelOperator(task_id="evaluate", challenger=trained.output, batch_size=0)
        PromoteModelOperator(task_id="promote", evaluation=evaluated.output, margin="much")
    return dag


LATER = ["epochs of tune", "batch_size of evaluate", "margin of promote"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        pytest.param({"epochs": 1}, LATER, id="right"),
        pytest.param({"batch_size": "{{ params.size }}", "world_size": 2}, ["batch_size of train", *LATER], id="wrong"),
        pytest.param({"params": {"size": 4}, "batch_size": "{{ params.size }}", "world_size": 2}, LATER, id="its own"),
        pytest.param({"batch_size": "{{ ti.xcom_pull('stage') }}", "epochs": 0}, [], id="known later"),
        pytest.param({"batch_size": "{{ macros.nothing() }}", "epochs": 0}, [], id="fails later"),
    ],
)
def test_what_can_be_known_is_checked(
    runs_uri: str, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], told: list[str]
) -> None:
    """Who takes what a task returns that cannot be judged yet cannot be judged either."""
    found = task_problems(run_of(wrong_dag(**fields), "stage", {}))
    assert [problem.path for problem in found] == told
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
