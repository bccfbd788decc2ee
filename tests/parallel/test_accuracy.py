"""What the demo promises, on more seeds than its own: digits 0-4 are learnt, then 5-9 from their features.

The stages of `dags/mnist_retrain.py` with the defaults of its form, on as many ranks as it says. The default seed runs
under Airflow, in `tests/system`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from parallel.inprocess import evaluation, worker_of
from parallel.worlds import Jobs

from mxdist.data.stage import stage
from mxdist.runtime import evaluate

pytestmark = pytest.mark.layouts

DAG = Path(__file__).parents[2] / "dags" / "mnist_retrain.py"


def defaults() -> dict[str, Any]:
    """Return the defaults of the DAG's form, read from its source: Airflow is not in this environment."""
    for node in ast.parse(DAG.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARAMS":
            assert isinstance(node.value, ast.Dict)
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {ast.literal_eval(key): ast.literal_eval(value.args[0]) for key, value in pairs}
    raise AssertionError(f"{DAG} has no PARAMS")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    root = tmp_path_factory.mktemp("digits")
    staged = stage("mnist5k", str(root / "data"), "mnist5k")
    return Jobs(root, {"manifest_uri": staged["manifest_uri"], "version": staged["version"]})


@pytest.mark.parametrize("seed", [1, 2])
def test_transferred_digits_reach_the_goal(digits: Jobs, seed: int) -> None:
    form = defaults()
    assert form["seed"] == 0, "that one runs under Airflow"

    def train(stage: str, labels: list[int], **init: Any) -> str:
        key = f"{stage}-{seed}"
        attempt = digits.trained(
            key,
            model={"name": "lenet"},
            dataset={**digits.dataset, "labels": labels},
            epochs=form[f"{stage}_epochs"],
            optimizer={"name": "adam", "learning_rate": form[f"{stage}_rate"]},
            batch_size=form["batch_size"],
            parallelism={"world_size": form["world_size"]},
            dtype="float32",
            seed=seed,
            **({"init": init} if init else {}),
        )
        return digits.publish(key, digits.folder(attempt) / "model")

    last = [5, 6, 7, 8, 9]
    pretrained = train("pretrain", [0, 1, 2, 3, 4])
    transferred = train("transfer", last, model_uri=pretrained, head="replace", freeze_backbone=True)
    tuned = train("finetune", last, model_uri=transferred)
    job = evaluation(digits, {"challenger": tuned}, dataset={**digits.dataset, "labels": last})
    scores = evaluate.run(job, worker_of(digits, digits.claim(job, f"evaluate-{seed}")))["outputs"]["scores"]
    assert scores["challenger"]["accuracy"] >= 0.95
