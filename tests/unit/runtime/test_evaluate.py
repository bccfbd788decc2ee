"""Scores of models on the same examples, against numbers counted by hand."""

from __future__ import annotations

import math
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from parallel.inprocess import evaluation, trained_model, worker_of
from parallel.worlds import Jobs, images, jobs

from mxdist.errors import DataError, SpecError, StoreError
from mxdist.runtime import evaluate
from mxdist.runtime.batches import Examples
from mxdist.runtime.parallel import Alone
from mxdist.runtime.pyfunc_model import Predictor
from mxdist.runtime.recipe import accuracy


@pytest.fixture
def small(tmp_path: Path) -> Jobs:
    """Three classes, with a test split."""
    return jobs(tmp_path, {"train": images(60), "test": images(50, seed=3)})


def test_scores_are_those_of_the_predictions(small: Jobs) -> None:
    scored = {"challenger": trained_model(small, "good"), "champion": trained_model(small, "bad", epochs=1, seed=4)}
    job = evaluation(small, scored, batch_size=7)
    attempt = small.claim(job, "eval")
    result = evaluate.run(job, worker_of(small, attempt))
    x, y = images(50, seed=3)
    for role, uri in scored.items():
        probabilities = Predictor(Path(uri)).predict(x)
        found = result["outputs"]["scores"][role]
        assert found["accuracy"] == (probabilities.argmax(axis=1) == y).mean() == result["metrics"][f"{role}_accuracy"]
        assert found["loss"] == pytest.approx(-np.log(probabilities[np.arange(50), y]).mean())
        assert found["count"] == sum(label["count"] for label in found["per_label"].values()) == 50
        assert sum(label["predicted"] for label in found["per_label"].values()) == 50
        assert found["per_label"]["1"]["count"] == (y == 1).sum()
        assert len(found["model_digest"]) == 64
    assert result["outputs"]["dataset_version"] == small.dataset["version"]
    assert {record.key for record in small.journal(attempt)} == set(result["metrics"])


def test_a_model_of_other_labels_is_scored_by_what_its_classes_mean() -> None:
    probabilities = np.array([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]])
    found = evaluate.score_probabilities(probabilities, [7, 5], np.array([1, 0, 2]), (5, 7, 9))
    # the examples are 7, 5 and 9; the model says 7, 7 and 5, and knows no 9
    assert found["accuracy"] == 1 / 3
    assert found["loss"] == pytest.approx(-(math.log(0.75) + math.log(0.5) + math.log(1e-12)) / 3)
    assert found["per_label"]["9"] == {"count": 1, "right": 0, "predicted": 0}
    assert found["per_label"]["7"] == {"count": 1, "right": 1, "predicted": 2}


def test_a_model_that_is_not_finite_has_no_scores_but_counts() -> None:
    probabilities = np.array([[0.75, 0.25], [np.nan, np.nan]])
    found = evaluate.score_probabilities(probabilities, [0, 1], np.array([0, 1]), (0, 1))
    assert (found["accuracy"], found["loss"], found["count"]) == (None, None, 2)


def test_a_network_is_scored_by_sums_and_counts() -> None:
    net = mx.gluon.nn.HybridLambda(lambda F, x: x)
    x, y = np.eye(3, dtype=np.float64)[[0, 1, 2, 2, 1] * 103], np.array([0, 1, 2, 0, 0] * 103)
    scores = evaluate.score(
        net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), {"accuracy": accuracy}, Examples(x, y),
        group=Alone(), device=mx.cpu(), dtype="float64",
    )  # fmt: skip
    right, wrong = math.log(math.e + 2) - 1, math.log(math.e + 2)
    assert scores == pytest.approx({"accuracy": 0.6, "loss": 0.6 * right + 0.4 * wrong}, abs=1e-12)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("/nowhere/model", "models.challenger: there is no model at /nowhere/model"),
        ("models:/m/1", "tracking.uri: is req"),
    ],
)
def test_a_model_that_is_not_there(small: Jobs, uri: str, said: str) -> None:
    job = evaluation(small, {"challenger": uri})
    with pytest.raises(SpecError) as refused:
        evaluate.run(job, worker_of(small, small.claim(job, "eval")))
    assert said in str(refused.value)


def test_a_damaged_model_is_not_scored(small: Jobs) -> None:
    uri = trained_model(small, "good")
    (Path(uri) / "symbol.json").write_text("{}")
    job = evaluation(small, {"challenger": uri})
    with pytest.raises(StoreError, match="not what its manifest says"):
        evaluate.run(job, worker_of(small, small.claim(job, "eval")))


def test_a_split_that_is_not_there(small: Jobs) -> None:
    job = evaluation(small, {"challenger": trained_model(small, "good")}, split="holdout")
    with pytest.raises(DataError, match="no split 'holdout'"):
        evaluate.run(job, worker_of(small, small.claim(job, "eval")))
