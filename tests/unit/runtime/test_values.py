"""Values that a training would stumble over are named before there is a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.inprocess import evaluation, trainer_of, worker_of
from parallel.worlds import images, jobs

from mxdist.errors import DataError, SpecError
from mxdist.runtime import evaluate, network
from mxdist.runtime.batches import Examples

NETWORK = "from mxnet.gluon import nn\ndef network(params): return nn.Dense(2)\n"
INSTANCE_NORM = """
from mxnet.gluon import nn

def network(params):
    net = nn.HybridSequential()
    net.add(nn.InstanceNorm(), nn.Dense(3))
    return net
"""
ANY_WIDTH = """
from mxnet.gluon import nn

def network(params):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.GlobalAvgPool2D(), nn.Dense(params["classes"]))
    return net
"""
STAGED = {"strategy": "model", "world_size": 1, "stages": 2}
SQUARES = "from mxnet import gluon\ndef loss(params): return gluon.loss.L2Loss()\n"


def own(tmp_path: Path, text: str) -> dict[str, Any]:
    """Return the model of a recipe with this text."""
    (tmp_path / "own.py").write_text(NETWORK + text)
    return {"recipe": str(tmp_path / "own.py")}


def refusal(tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> str:
    """Return what is said of these arrays; no network may have been built."""
    built: list[Any] = []
    monkeypatch.setattr(network, "prepare", lambda *args, **kinds: built.append(args))
    small = jobs(tmp_path, {"train": train})
    with pytest.raises(DataError) as caught:
        trainer_of(small, "odd", **{"dtype": "float32", **fields})
    assert built == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, 2**24 + 1], "label 16777217 in row 2; float32 keeps whole numbers up to 16777216 apart"),
        ([0, 1, 2**62], "label 4611686018427387904 in row 2"),
        (np.array([0, 1, 2**64 - 1], dtype=np.uint64), "label 18446744073709551615 in row 2"),
        ([0, 5_000_000, 1], "label 5000000 in row 1: that would be 5000001 outputs"),
        ([-1, 0, 1], "label -1 in row 0"),
    ],
)
def test_labels_that_cannot_be_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: Any, said: str) -> None:
    assert said in refusal(tmp_path, (np.ones((3, 4), np.float32), np.asarray(labels)), monkeypatch)


def test_one_class_is_nothing_to_learn(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(8, classes=1)})
    with pytest.raises(DataError, match="one class only"):
        trainer_of(small, "one", model={"name": "mlp", "params": {"hidden": 4}})


def test_a_network_that_mxnet_cannot_run_is_told_in_a_line(tmp_path: Path) -> None:
    recipe = own(tmp_path, "").get("recipe")
    Path(str(recipe)).write_text(INSTANCE_NORM)
    small = jobs(tmp_path, {"train": images(8)})
    with pytest.raises(SpecError, match="the network cannot take 2 examples of shape .* in float64"):
        trainer_of(small, "norm", model={"recipe": recipe}, dtype="float64")


def test_labels_above_the_given_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"name": "mlp", "params": {"classes": 2}}
    said = refusal(tmp_path, images(20, classes=3), monkeypatch, model=model)
    assert "y of the train split holds the label 2 in row" in said
    assert "but the network has 2 outputs. Set dataset.labels" in said


def test_inputs_and_targets_that_are_not_finite_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import numpy as np\ndef data(folder, split, params):\n    x, y = np.ones((6, 3)), np.ones((6, 2))\n"
    text += "    x[4, 1] = np.nan\n    y[2, 0] = np.inf\n    return (x, y) if split == 'train' else None\n"
    said = refusal(tmp_path, images(20), monkeypatch, model=own(tmp_path, SQUARES + text))
    assert "x of the train split holds nan in row 4" in said
    assert "y of the train split holds inf in row 2" in said


def test_an_input_too_large_for_the_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((3, 4))
    x[1] = 1e39
    said = refusal(tmp_path, (x, np.array([0, 1, 0])), monkeypatch)
    assert "1e+39 in row 1, which is not finite in float32" in said


def test_fractions_are_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import numpy as np\ndef data(folder, split, params): return np.ones((3, 2)), np.array([0, 1, 0.5])\n"
    assert "holds 0.5 in row 2" in refusal(tmp_path, images(20), monkeypatch, model=own(tmp_path, text))


@pytest.mark.parametrize("returned", ["np.ones((3, 2)) * 1j, np.zeros(3)", "np.ones((3, 2)), np.array(['a'] * 3)"])
def test_what_a_recipe_returns_must_be_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: str) -> None:
    text = f"import numpy as np\ndef data(folder, split, params): return {returned}\n"
    said = refusal(tmp_path, images(20), monkeypatch, model=own(tmp_path, text))
    assert "of the train split holds " in said
    assert "only real numbers" in said


def test_data_that_are_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def data(folder, split, params): return 7\n"
    said = refusal(tmp_path, images(20), monkeypatch, model=own(tmp_path, text))
    assert "returned int for the train split, not (x, y)" in said


def test_a_preprocess_of_its_own_may_fill_gaps(tmp_path: Path) -> None:
    x, y = np.ones((6, 4), dtype=np.float32), np.array([0, 1] * 3)
    x[3, 1] = np.nan
    text = "def preprocess(F, x, params): return F.where(x == x, x, F.zeros_like(x))\n"
    small = jobs(tmp_path, {"train": (x, y)})
    outcome = trainer_of(small, "gaps", model=own(tmp_path, text), epochs=1, batch_size=3).run()
    assert np.isfinite(outcome.result["metrics"]["train_loss"])


@pytest.mark.parametrize("rate", [0.5, 0])
@pytest.mark.parametrize(
    "parallelism",
    [
        {},
        {"world_size": 2},
        {"world_size": 2, "lossy": ["dropout"]},
        {"accumulate": 2},
        {"strategy": "devices", "devices": 2},
        {"strategy": "devices", "devices": 2, "lossy": ["dropout"]},
        {"strategy": "model", "stages": 2},
    ],
)
def test_dropout_in_several_parts_must_be_meant(tmp_path: Path, rate: float, parallelism: dict[str, Any]) -> None:
    (tmp_path / "own.py").write_text(
        "from mxnet.gluon import nn\ndef network(params):\n    net = nn.HybridSequential()\n"
        f"    net.add(nn.Dense(4), nn.Dropout({rate}), nn.Dense(3))\n    return net\n"
    )
    small = jobs(tmp_path, {"train": images(20, classes=3)})
    fields = {"model": {"recipe": str(tmp_path / "own.py")}, "parallelism": parallelism}
    if rate and parallelism and "lossy" not in parallelism:
        with pytest.raises(SpecError, match="parallelism.lossy: the network draws random numbers .*Dropout"):
            trainer_of(small, "drop", **fields)
    else:
        assert trainer_of(small, "drop", **fields).setup.random is bool(rate)


@pytest.mark.parametrize("parallelism", [{"world_size": 1}, STAGED], ids=["whole", "stages"])
def test_a_validation_split_of_another_width_is_refused_before_the_first_step(
    tmp_path: Path, parallelism: dict[str, Any]
) -> None:
    small = jobs(tmp_path, {"train": images(8), "validation": images(4, shape=(1, 12, 14))})
    model = {"name": "mlp", "params": {"hidden": 4, "layers": 2}}
    with pytest.raises(DataError) as caught:
        trainer_of(small, "wide", model=model, parallelism=parallelism)
    assert "train split, (1, 12, 12)" in str(caught.value)
    assert "validation split, (1, 12, 14)" in str(caught.value)


def test_labels_of_another_shape_are_refused_before_the_first_step(tmp_path: Path) -> None:
    text = "import numpy as np\ndef data(folder, split, params):\n    width = 2 if split == 'train' else 3\n"
    text += "    return np.ones((6, 3)), np.ones((6, width))\n"
    small = jobs(tmp_path, {"train": images(20)})
    with pytest.raises(DataError, match=r"labels of shape \(2,\), but not .*labels of shape \(3,\)"):
        trainer_of(small, "labels", model=own(tmp_path, SQUARES + text))


def test_a_network_for_any_width_may_be_validated_on_another(tmp_path: Path) -> None:
    (tmp_path / "any.py").write_text(ANY_WIDTH)
    small = jobs(tmp_path, {"train": images(8), "validation": images(4, shape=(1, 12, 14))})
    outcome = trainer_of(small, "any", model={"recipe": str(tmp_path / "any.py")}, epochs=1).run()
    assert "validation_accuracy" in outcome.result["metrics"]


def test_examples_say_which_split_is_empty() -> None:
    with pytest.raises(DataError, match="there are no examples of the validation split"):
        Examples(np.zeros((0, 1)), np.zeros(0), "validation")
    with pytest.raises(DataError, match="there are 3 examples, but 2 labels of the test split"):
        Examples(np.zeros((3, 1)), np.zeros(2), "test")
    with pytest.raises(DataError, match="y of the test split is a single number"):
        Examples(np.zeros((3, 1)), np.float64(2), "test")  # type: ignore[arg-type]


def test_an_evaluation_names_labels_that_are_no_classes(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"test": (np.ones((3, 4)), np.array([0, 1, 10**12]))})
    job = evaluation(small, {"challenger": "nowhere"})
    with pytest.raises(DataError, match="y of the test split holds the label 1000000000000 in row 2"):
        evaluate.run(job, worker_of(small, small.claim(job, "eval")))
