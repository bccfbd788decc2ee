"""The law for other networks than the plain LeNet: BatchNorm over all ranks, a ResNet of the zoo, a Transformer.

Two ranks against one process in plain Gluon, whose BatchNorm is Gluon's own; float64, 20 steps, running statistics too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.test_law import BOUND, Law, make_law
from parallel.worlds import images

pytestmark = pytest.mark.layouts

RESNET = """
from mxnet.gluon.model_zoo.vision import BasicBlockV1, ResNetV1

def network(params):
    return ResNetV1(BasicBlockV1, [1, 1], [4, 4, 8], classes=params["classes"], thumbnail=True)
"""
NORM = {"name": "lenet", "params": {"channels": 4, "hidden": 16, "batch_norm": True}}
ROWS: tuple[dict[str, Any], ...] = ({"strategy": "devices", "devices": 3}, {"accumulate": 3})
"""What one process does in parts."""

SIZE = {"layers": 2, "units": 8, "heads": 2, "hidden": 12, "vocabulary": 20, "positions": 9}
TOGETHER: dict[str, Any] = {"parallelism": {"batch_norm": "synchronised"}}


def sequences(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids, of 3 to 9 tokens and padded with 0, and labels that can be learnt from them."""
    generator = np.random.RandomState(5)
    x, y = generator.randint(4, 20, (count, 9)), generator.randint(0, 3, count)
    x[:, 1] = y + 1
    for row, length in zip(x, generator.randint(3, 10, count), strict=True):
        row[length:] = 0
    return x.astype(np.int32), y.astype(np.int64)


@pytest.fixture(scope="module")
def norm(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """LeNet with BatchNorm; one row in the last batch, so that one rank has none."""
    return make_law(tmp_path_factory.mktemp("law") / "norm", "sgd", 73, network="lenet_norm")


def test_synchronised_batch_norm(norm: Law) -> None:
    assert {name.rpartition(".")[2] for name in norm.weights} >= {"running_mean", "running_var"}
    assert norm.difference(ranks=2, model=NORM, **TOGETHER) < BOUND


def test_local_statistics_break_the_law(norm: Law) -> None:
    broken = norm.difference(ranks=2, model=NORM, mutation="local_statistics+unchecked", **TOGETHER)
    assert broken > 1000 * BOUND


def test_local_statistics_on_purpose_train_and_agree(norm: Law) -> None:
    """Another model than one process trains, and the same on all ranks: which they compare after each epoch."""
    lossy = {"batch_norm": "local", "lossy": ["batch_norm"]}
    assert norm.difference(ranks=2, model=NORM, parallelism=lossy) > 1000 * BOUND


def test_frozen_batch_norm(tmp_path: Path) -> None:
    law = make_law(tmp_path / "frozen", "adam", 77, network="lenet_frozen")
    assert law.difference(ranks=2, model=NORM, parallelism={"batch_norm": "frozen"}) < BOUND
    for row in ({}, *ROWS):
        assert law.here(model=NORM, parallelism={"batch_norm": "frozen", **row}) < BOUND


def test_small_resnet_of_the_zoo(tmp_path: Path) -> None:
    """Branches that join: two exchanges can be under way at once."""
    law = make_law(tmp_path / "resnet", "adam", 77, network="resnet", shape=(3, 16, 16))  # 5 rows: 2 and 3
    (tmp_path / "resnet.py").write_text(RESNET)
    assert law.difference(ranks=2, model={"recipe": str(tmp_path / "resnet.py")}, **TOGETHER) < BOUND


def test_frozen_resnet_in_parts(tmp_path: Path) -> None:
    law = make_law(tmp_path / "resnet", "sgd", 75, network="resnet_frozen", shape=(3, 16, 16))
    (tmp_path / "resnet.py").write_text(RESNET)
    for row in ROWS:
        found = law.here(model={"recipe": str(tmp_path / "resnet.py")}, parallelism={"batch_norm": "frozen", **row})
        assert found < BOUND


@pytest.mark.parametrize(("network", "optimizer"), [("mlp", "sgd"), ("encoder", "adam")])
def test_networks_without_batch_norm(tmp_path: Path, network: str, optimizer: str) -> None:
    models: dict[str, Any] = {
        "mlp": {"name": "mlp", "params": {"hidden": 16}},
        "encoder": {"name": "transformer_encoder", "params": {**SIZE, "pad_id": 0}},
    }
    data = sequences(73) if network == "encoder" else images(73, shape=(1, 16, 16))
    law = make_law(tmp_path / network, optimizer, 73, network=network, data=data)
    assert law.difference(ranks=2, model=models[network]) < BOUND
    for row in ROWS:
        assert law.here(model=models[network], parallelism=row) < BOUND
