"""An exported model predicts by itself, and gives what the network gave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pandas as pd
import pytest
from parallel.inprocess import trainer_of
from parallel.worlds import Jobs, images, jobs

from mxdist.runtime import pyfunc_model
from mxdist.runtime.finetune import label_digest
from mxdist.runtime.pyfunc_model import Predictor
from mxdist.spec import digest_of

CONV_NORM = """
from mxnet.gluon import nn

def network(params):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(3, 3), nn.BatchNorm(), nn.Dropout(0.5), nn.GlobalAvgPool2D(), nn.Dense(params["classes"]))
    return net

def preprocess(F, x, params):
    return (x - 127.5) / 127.5
"""

REGRESSION = """
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

def network(params):
    return nn.Dense(1)

def data(folder, split, params):
    x = np.random.RandomState(0).randn(20, 4)
    return (x, x.sum(axis=1, keepdims=True)) if split == "train" else None

def loss(params):
    return gluon.loss.L2Loss()

def metrics(params):
    return {"absolute_error": lambda F, output, label: F.abs(output - label).reshape((-1,))}
"""

ALONE = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import pyfunc_model
model = pyfunc_model._load_pyfunc(sys.argv[2])
found = model.predict(np.load(sys.argv[2] + "/input_example.npy"))
assert not [name for name in sys.modules if name.startswith("mxdist")]
print(json.dumps(found.tolist()))
"""


@pytest.fixture
def small(tmp_path: Path) -> Jobs:
    """Three classes, with a validation split."""
    return jobs(tmp_path, {"train": images(40), "validation": images(10, seed=5)})


def exported(small: Jobs, **fields: Any) -> tuple[Any, Path]:
    """Train a job; return the trainer and the folder of its model."""
    trainer = trainer_of(small, "exported", **fields)
    return trainer, Path(trainer.run().result["model_dir"])


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return probabilities."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def recipe(tmp_path: Path, text: str) -> dict[str, Any]:
    """Return the model of a recipe."""
    (tmp_path / "recipe.py").write_text(text)
    return {"recipe": str(tmp_path / "recipe.py")}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_predicts_what_the_network_says(small: Jobs, dtype: str) -> None:
    trainer, folder = exported(small, dtype=dtype)
    x = images(300, seed=9)[0]
    predicted = Predictor(folder).predict(x)
    scores = trainer.setup.net(mx.nd.array(x, dtype=dtype) / 255).asnumpy()
    assert predicted.dtype == dtype
    assert predicted == pytest.approx(softmax(scores), abs=1e-6)


def test_preprocessing_and_inference_mode_are_part_of_it(small: Jobs, tmp_path: Path) -> None:
    trainer, folder = exported(small, model=recipe(tmp_path, CONV_NORM), dtype="float32")
    x = images(7, seed=9)[0]
    scores = trainer.setup.net((mx.nd.array(x, dtype="float32") - 127.5) / 127.5).asnumpy()
    predictor = Predictor(folder)
    assert predictor.predict(x) == pytest.approx(softmax(scores), abs=1e-6)
    assert (predictor.predict(x) == predictor.predict(x)).all()


def test_takes_frames_and_flat_rows(small: Jobs) -> None:
    predictor = Predictor(exported(small)[1])
    x = images(5, seed=9)[0]
    expected = predictor.predict(x)
    assert expected.sum(axis=1) == pytest.approx(np.ones(5))
    assert (predictor.predict(pd.DataFrame(x.reshape(5, -1))) == expected).all()
    assert (predictor.predict(pd.DataFrame({"image": list(x)})) == expected).all()
    assert (predictor.predict(x.reshape(5, -1).astype(np.float64), params={"unused": 1}) == expected).all()
    assert predictor.predict(x[:0]).shape == (0, 3)
    with pytest.raises(ValueError, match=r"each example must have shape \(1, 12, 12\)"):
        predictor.predict(np.zeros((2, 5)))


def test_needs_nothing_of_mxdist(small: Jobs, tmp_path: Path) -> None:
    _, folder = exported(small)
    code = tmp_path / "code"
    code.mkdir()
    (code / "pyfunc_model.py").write_bytes(Path(pyfunc_model.__file__).read_bytes())
    command = [sys.executable, "-I", "-c", ALONE, str(code), str(folder)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert np.array(json.loads(printed)).shape == (4, 3)


def test_says_what_it_is(small: Jobs) -> None:
    _, folder = exported(small, model={"name": "mlp", "params": {"hidden": 7}})
    about = json.loads((folder / "model.json").read_text())
    assert about["network"] == "mlp"
    assert about["params"] == {"hidden": 7, "classes": 3}
    assert (about["classes"], about["labels"]) == (3, [0, 1, 2])
    assert about["label_digest"] == digest_of([0, 1, 2]) == label_digest((0, 1, 2))
    assert (about["input_shape"], about["input_dtype"], about["dtype"]) == ([1, 12, 12], "uint8", "float64")
    assert about["preprocessing"] == {"scale": 1 / 255, "to_channels_first": False}
    assert about["framework"]["mxnet"] == mx.__version__
    assert about["parent"] is None
    example = np.load(folder / "input_example.npy", allow_pickle=False)
    assert (example.shape, example.dtype) == ((4, 1, 12, 12), np.uint8)
    with np.load(folder / "params.npz", allow_pickle=False) as arrays:
        assert sorted(arrays.files)[:2] == ["features.0.bias", "features.0.weight"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "input_example.npy", "model.json", "params.npz", "symbol.json",
    ]  # fmt: skip


def test_labels_are_kept(small: Jobs) -> None:
    small.dataset["labels"] = [2, 0]
    trainer, folder = exported(small)
    about = json.loads((folder / "model.json").read_text())
    assert (about["classes"], about["labels"]) == (2, [2, 0])
    assert set(trainer.setup.train.y.tolist()) == {0, 1}


def test_a_model_that_does_not_classify(small: Jobs, tmp_path: Path) -> None:
    fields = {"optimizer": {"learning_rate": 0.05}, "epochs": 40}
    trainer, folder = exported(small, model=recipe(tmp_path, REGRESSION), **fields)
    about = json.loads((folder / "model.json").read_text())
    assert (about["classes"], about["labels"], about["probabilities"]) == (1, None, False)
    x = np.random.RandomState(1).randn(6, 4)
    assert Predictor(folder).predict(x).ravel() == pytest.approx(x.sum(axis=1), abs=0.05)
    assert set(trainer.at.metrics) == {"loss", "train_loss"}


def test_images_with_channels_last_are_turned(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(30, shape=(12, 12, 3))})
    trainer, folder = exported(small, model={"name": "cifar_cnn"})
    x = images(4, seed=9, shape=(12, 12, 3))[0]
    scores = trainer.setup.net(mx.nd.array(x.transpose(0, 3, 1, 2), dtype="float64") / 255).asnumpy()
    assert Predictor(folder).predict(x) == pytest.approx(softmax(scores), abs=1e-9)
