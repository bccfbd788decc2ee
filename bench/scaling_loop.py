"""The sides of rows ``scaling`` and ``peer`` that train with MXNet: ResNet-18, 64 x 64, 2 ranks with 16 examples each.

``--side mxdist``: mxdist's own loop, its ranks laid out and pinned by the plan. ``--side horovod``: a plain Gluon loop
with Horovod's trainer; start it with horovodrun. Both train the same network from normal images of one seed, by SGD
with momentum, hybridized, in float32, without reading the loss at every step. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

BATCH, SIDE, RANKS, WARMUP = 16, 64, 2, 8
RATE, MOMENTUM = 0.01, 0.9


def examples(rows: int) -> tuple[Any, Any]:
    """Return images (rows, 3, 64, 64), float32, and labels 0 to 9."""
    generator = np.random.RandomState(0)
    return generator.standard_normal((rows, 3, SIDE, SIDE)).astype(np.float32), np.arange(rows) % 10


def document(folder: Path, steps: int, cycle_ms: float) -> dict[str, Any]:
    """Stage one epoch of examples, and return the job."""
    from mxdist.data.stage import stage

    source = folder / "source" / "train"
    source.mkdir(parents=True)
    x, y = examples((WARMUP + steps) * BATCH * RANKS)
    np.save(source / "x.npy", x)
    np.save(source / "y.npy", y)
    staged = stage(str(source.parent), str(folder / "data"), "scaling")
    return {
        "name": "scaling",
        "model": {"name": "resnet18_v1", "params": {"classes": 10}},
        "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]},
        "optimizer": {"name": "sgd", "learning_rate": RATE, "momentum": MOMENTUM},
        "epochs": 1,
        "batch_size": BATCH * RANKS,
        "parallelism": {
            "world_size": RANKS, "batch_norm": "local", "lossy": ["batch_norm"], "cycle_time_ms": cycle_ms,
        },
    }  # fmt: skip


def horovod_rank(steps: int) -> None:
    """Train on this rank in a plain loop."""
    import horovod.mxnet as hvd
    import mxnet as mx
    from mxnet import autograd, gluon
    from mxnet.gluon.model_zoo import vision

    hvd.init()
    x, y = examples((WARMUP + steps) * BATCH * RANKS)
    own = slice(hvd.rank(), None, RANKS)
    data, labels = mx.nd.array(x[own]), mx.nd.array(y[own])
    mx.random.seed(0)
    net = vision.resnet18_v1(classes=10)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    net(data[:1])
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": RATE, "momentum": MOMENTUM})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    began = 0.0
    for step in range(WARMUP + steps):
        if step == WARMUP:
            mx.nd.waitall()
            began = time.monotonic()
        rows = slice(step * BATCH, (step + 1) * BATCH)
        with autograd.record():
            loss = loss_of(net(data[rows]), labels[rows])
        loss.backward()
        trainer.step(BATCH)
    mx.nd.waitall()
    if hvd.rank() == 0:
        print(json.dumps({"steps": steps, "seconds": time.monotonic() - began}), flush=True)
    hvd.shutdown()


def main() -> None:
    """Run one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=["mxdist", "horovod"], required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cycle-ms", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="of a rank that this program has started")
    options = parser.parse_args()
    if options.side == "horovod":
        return horovod_rank(options.steps)
    import world  # not on the other side, which knows nothing of mxdist

    if options.folder:
        return world.rank(options.folder, WARMUP, options.steps)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        job = document(folder, options.steps, options.cycle_ms)
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, __file__, "--side", "mxdist", "--folder", scratch, "--steps", str(options.steps)]
        world.start(folder, command, job)


if __name__ == "__main__":
    main()
