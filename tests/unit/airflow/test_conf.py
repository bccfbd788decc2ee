"""A run's configuration may name only parameters of the DAG; a typing mistake must not train with the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, Param
from airflow.sdk.exceptions import AirflowFailException
from unit.airflow.world import context_of

from mxdist.errors import SpecError
from mxdist.operators.conf import check_conf
from mxdist.operators.stage import StageDatasetOperator
from mxdist.operators.train import DistributedTrainOperator

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
