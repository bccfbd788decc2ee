"""The memory that a job is said to need, against what it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from parallel.worlds import PLUGINS

from mxdist.runtime.batches import Examples
from mxdist.runtime.estimate import Assembly, Estimate, Unbuilt
from mxdist.spec import TrainingJob

MEASURED = """
import json, sys
import mxnet as mx, numpy as np
from mxnet import autograd
from mxdist.runtime import models
from mxdist.runtime.estimate import resident

name, params, shape, rows = json.loads(sys.argv[1])
one = mx.nd.ones((1, 4))
mx.nd.waitall()
base = resident("VmRSS")
net = models.build(name, params)
net.initialize(mx.init.Xavier())
net.hybridize(static_alloc=True, static_shape=True)
loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
sgd = {"learning_rate": 0.01, "momentum": 0.9}
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", sgd, update_on_kvstore=False)
x, y = mx.nd.ones((rows, *shape)), mx.nd.zeros((rows,))
for _ in range(3):
    with autograd.record():
        value = loss(net(x), y)
    value.backward()
    trainer.step(rows)
    mx.nd.waitall()
print(resident("VmHWM") - base)
"""
ENCODER = {"classes": 10, "units": 256, "heads": 4, "hidden": 1024, "layers": 4, "vocabulary": 5000}


def estimate_of(name: str, params: dict[str, Any], x: Any, **fields: Any) -> Estimate:
    """Return the estimate of a job, with no base."""
    document = {
        "name": "small", "model": {"name": name, "params": params}, "epochs": 1,
        "dataset": {"manifest_uri": "/data/small/manifests/" + "0" * 64 + ".json", "version": "0" * 64},
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9},
    }  # fmt: skip
    job = TrainingJob.parse(document | {"batch_size": len(x)} | fields)
    train = Examples(x, np.arange(len(x)) % 10)
    return Assembly(Unbuilt(job, train), 0).estimate()


@pytest.mark.parametrize(
    ("name", "params", "shape", "rows"),
    [
        ("resnet18_v1", {"classes": 10}, (3, 64, 64), 96),
        ("transformer_encoder", ENCODER, (128,), 32),
    ],
)
def test_it_is_within_a_quarter_of_what_training_takes(
    name: str, params: dict[str, Any], shape: tuple[int, ...], rows: int
) -> None:
    """Growth above the base of a process that has MXNet; without checkpoints and chunks, which a plain loop has not."""
    environment = {**os.environ, "PYTHONPATH": str(PLUGINS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", MEASURED, json.dumps([name, params, shape, rows])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    measured = int(done.stdout)
    dtype = np.int32 if len(shape) == 1 else np.float32
    stage = estimate_of(name, params, np.zeros((rows, *shape), dtype=dtype)).ranks[0].stages[0]
    assert 0.75 <= stage.total / measured <= 1.25


def test_parameters_are_counted_as_published() -> None:
    """BERT-base: 109,482,240 parameters (Devlin et al., with the pooler), and 10 times 768 + 1 of the classifier."""
    found = estimate_of("bert_base", {"classes": 10}, np.zeros((2, 8), dtype=np.int32))
    count = 109_482_240 + 10 * 769
    assert found.ranks[0].stages[0].count == count
    assert found.checkpoint == 2 * 4 * count  # float32, and one momentum for each


def mlp(rows: int = 32, **parallelism: Any) -> Estimate:
    """Return the estimate of three layers of 64, of 32 inputs, on a batch of ``rows``."""
    x = np.zeros((rows, 32), dtype=np.float32)
    return estimate_of("mlp", {"classes": 10, "hidden": 64, "layers": 3}, x, parallelism=parallelism)


SIZES = [33 * 64, 65 * 64, 65 * 64, 65 * 10]


def test_stages_share_the_parameters() -> None:
    stages = mlp(strategy="pipeline", cuts=["features.2"], micro_batches=4).ranks[0].stages
    assert [stage.count for stage in stages] == [sum(SIZES[:2]), sum(SIZES[2:])]


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", (4, 4)), ("1f1b", (2, 1))])
def test_a_schedule_holds_what_it_promises(schedule: str, held: tuple[int, int]) -> None:
    """GPipe: all m micro-batches; 1F1B: min(m, stages - stage)."""
    layout = {"strategy": "pipeline", "cuts": ["features.2"], "schedule": schedule}
    one = mlp(8, **layout)
    four = mlp(32, **layout, micro_batches=4)
    singles = [stage.kept for stage in one.ranks[0].stages]
    kept = [stage.kept for stage in four.ranks[0].stages]
    assert kept == [times * single for times, single in zip(held, singles, strict=True)]


def test_ranks_and_devices() -> None:
    two = mlp(world_size=2).ranks
    assert [rank.checkpoint for rank in two] == [2 * 2 * 4 * sum(SIZES), 0]
    devices = mlp(strategy="devices", devices=2).ranks[0].stages
    assert [(stage.device, stage.optimizer > 0) for stage in devices] == [(0, True), (1, False)]
    across = mlp(strategy="pipeline", cuts=["features.2"], across="processes", world_size=2).ranks
    assert [rank.stages[0].stage for rank in across] == [0, 1]
    assert across[0].elsewhere == 2 * 4 * sum(SIZES[2:])


def test_kept_is_what_the_layers_of_an_mlp_put_out() -> None:
    """Each ReLU keeps its output; the last layer's scores are kept as their log-softmax."""
    kept = mlp().ranks[0].stages[0].kept
    least = 32 * (3 * 64 + 10) * 4
    assert least <= kept <= 1.5 * least


def test_the_document_has_its_sums() -> None:
    document = mlp().to_document()
    rank = document["ranks"][0]
    beside = sum(rank[name] for name in ("elsewhere", "inputs", "exchange", "checkpoint", "base"))
    stages = sum(
        stage[name] for stage in rank["stages"] for name in ("parameters", "gradients", "optimizer", "kept", "working")
    )
    assert rank["peak"] == beside + stages
