"""The peer of row ``kvstore``: a plain Gluon loop with ``dist_sync``, as MXNet's own examples write it.

One worker: the guide's CNN, hybridized, its share of random images in memory, the optimizer on the servers (MXNet's
default). Imports nothing of mxdist. The worker of rank 0 prints one JSON line: steps, seconds.
"""

from __future__ import annotations

import argparse
import json
import time

import mxnet as mx
import plain_loop
from mxnet import autograd, gluon


def main() -> None:
    """Warm up, then time the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="over all workers")
    options = parser.parse_args()
    store = mx.kv.create("dist_sync")
    share = options.batch_size // store.num_workers
    x, y = plain_loop.images(100 * share)
    x, y = mx.nd.array(x, dtype="uint8"), mx.nd.array(y)
    mean, deviation = (mx.nd.array(values).reshape((1, 3, 1, 1)) for values in (plain_loop.MEAN, plain_loop.STD))
    net = plain_loop.network()
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9}, kvstore=store)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    started = 0.0
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            mx.nd.waitall()
            started = time.monotonic()
        begin = step % 100 * share
        data = (x[begin : begin + share].astype("float32").transpose((0, 3, 1, 2)) / 255 - mean) / deviation
        with autograd.record():
            loss = loss_of(net(data), y[begin : begin + share])
        loss.backward()
        trainer.step(options.batch_size)
        float(loss.mean().asscalar())
    mx.nd.waitall()
    if store.rank == 0:
        print(json.dumps({"steps": options.steps, "seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    main()
