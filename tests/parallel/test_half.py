"""Gradients that travel as float16: how far off they are, that they still train, and that none overflows in silence."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel.worlds import images, jobs, start

from mxdist.runtime import exit_codes

HALF = {"world_size": 2, "compression": "fp16", "lossy": ["compression"]}
LARGE = """
from mxnet import gluon
from mxnet.gluon import nn

def network(params):
    net = nn.HybridSequential()
    net.add(nn.Dense(params["classes"]))
    return net

def preprocess(F, x, params):
    return x * params["scale"]
"""


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks found; the same."""
    folder = tmp_path_factory.mktemp("half")
    world = start(folder, [sys.executable, str(Path(__file__).with_name("half_checks.py")), str(folder)], 2)
    assert world.wait() == [0, 0], world.logs()
    first: dict[str, Any]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    return first


def test_error_is_within_the_stated_bound(summed: dict[str, Any]) -> None:
    assert all(1e-5 < error <= 2 * 2**-11 for error in summed["errors"])


def test_what_float16_cannot_hold_becomes_infinite(summed: dict[str, Any]) -> None:
    assert summed["overflow"] == ["inf", "inf", "2.0"]


def test_training_converges(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(64)})
    fields: dict[str, Any] = {"epochs": 6, "optimizer": {"name": "adam", "learning_rate": 0.01}}
    attempt = small.claim(small.job(parallelism=HALF, dtype="float32", **fields), "half")
    world = small.start(attempt)
    assert world.wait() == [0, 0], world.logs()
    losses = [record.value or math.inf for record in small.journal(attempt) if record.key == "train_loss"]
    assert losses[-1] < 0.3 * losses[0]


def test_overflow_ends_the_training_and_is_told(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(64)})
    recipe = tmp_path / "large.py"
    recipe.write_text(LARGE)
    model = {"recipe": str(recipe), "params": {"scale": 1e4}}
    attempt = small.claim(small.job(model=model, parallelism=HALF, dtype="float32"), "overflow")
    world = small.start(attempt)
    assert world.wait() == [exit_codes.NONFINITE] * 2, world.logs()
    message = world.result()["error"]["message"]
    assert "is not finite at step 1 on rank 0" in message
    assert "float16" in message
    assert "compression to none" in message
