"""One rank of a script that verifies sound and broken ways to train: ``python script_checks.py FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

from mxdist.errors import TrainingFailed
from mxdist.runtime.worker import Worker

ROWS = {"equal": (4, 4), "uneven": (3, 5)}


def network(seed: int, *layers: Any) -> Any:
    """Return a network with weights of this seed."""
    net = nn.HybridSequential()
    net.add(nn.Dense(6, activation="relu"), *layers, nn.Dense(3))
    net.cast("float64")
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 5), dtype="float64"))
    return net


def verdict(worker: Worker, net: Any, rows: str = "equal", **options: Any) -> Any:
    """Return what verifying says, and whether all is as before."""
    start, end = (0, ROWS[rows][0]) if worker.rank == 0 else (ROWS[rows][0], sum(ROWS[rows]))
    numbers = np.random.RandomState(3)
    x, y = numbers.standard_normal((8, 5))[start:end], numbers.randint(0, 3, 8)[start:end]
    batch = mx.nd.array(x, dtype="float64"), mx.nd.array(y, dtype="float64")
    before = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    try:
        found: Any = worker.verify(net, gluon.loss.SoftmaxCrossEntropyLoss(), batch, **options)
    except TrainingFailed as error:
        found = error.message
    after = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    return [found, all((one == two).all() for one, two in zip(before, after, strict=True))]


if __name__ == "__main__":
    hvd.init()
    worker = Worker.current()
    told = {
        "sound": verdict(worker, network(1)),
        "other_weights": verdict(worker, network(hvd.rank())),
        "mean_of_means": verdict(worker, network(1), "uneven"),
        "local_statistics": verdict(worker, network(1, nn.BatchNorm())),
        "not_reduced": verdict(worker, network(1), reduce=lambda: None),
    }
    (Path(sys.argv[1]) / f"{hvd.rank()}.json").write_text(json.dumps(told))
    mx.nd.waitall()
    worker.agree(True)
