"""The work of row ``overhead``: a Horovod script as a user has it, with one addition.

It logs each step's loss when mxdist started it, and is otherwise the same under horovodrun and under mxdist: it pins
its rank to a core itself. Rank 0 writes one JSON line to the file named by ``--out``: steps, seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import horovod.mxnet as hvd
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon.model_zoo import vision


def main() -> None:
    """Train ResNet-18 on random 64 x 64 images, warm up, then time the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    options = parser.parse_args()
    hvd.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[hvd.local_rank() % len(cores)]})
    worker = None
    if "MXDIST_WORLD_DIR" in os.environ:
        from mxdist.runtime.worker import Worker

        worker = Worker.current()
    mx.random.seed(hvd.rank())
    data = mx.nd.random.uniform(shape=(options.batch_size, 3, 64, 64))
    label = mx.nd.arange(options.batch_size) % 10
    net = vision.resnet18_v1(classes=10)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(data)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    started = 0.0
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            mx.nd.waitall()
            started = time.monotonic()
        with autograd.record():
            loss = loss_of(net(data), label)
        loss.backward()
        trainer.step(options.batch_size)
        value = float(loss.mean().asscalar())
        if worker is not None:
            worker.log_metrics({"loss": value}, step=step)
            worker.beat(step)
    mx.nd.waitall()
    if hvd.rank() == 0:
        options.out.write_text(json.dumps({"steps": options.steps, "seconds": time.monotonic() - started}))
    hvd.shutdown()


if __name__ == "__main__":
    main()
