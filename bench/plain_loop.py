"""The peer of row ``loop``: a plain Gluon loop, as a guide teaches it, with its errors mended.

One process, a DataLoader with per-image transforms, the loss read after every batch. Imports nothing of mxdist.
Prints one JSON line: steps, seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.data.vision import transforms

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``count`` random images as CIFAR-10 keeps them (N, 32, 32, 3, uint8) and labels 0 to 9."""
    generator = np.random.RandomState(0)
    return generator.randint(0, 256, (count, 32, 32, 3), dtype=np.uint8), generator.randint(0, 10, count)


def network() -> nn.HybridSequential:
    """Return the guide's CNN."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(32, kernel_size=3, activation="relu"), nn.MaxPool2D(pool_size=2), nn.Dense(10))
    return net


def steps(net: nn.HybridSequential, loader: gluon.data.DataLoader) -> Iterator[float]:
    """Train for one epoch; yield the mean loss of every batch."""
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.001})
    while True:
        for data, label in loader:
            with autograd.record():
                loss = loss_of(net(data), label)
            loss.backward()
            trainer.step(data.shape[0])
            yield float(loss.mean().asscalar())


def main() -> None:
    """Warm up, then time the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hybridize", action="store_true", help="which the guide does not do")
    options = parser.parse_args()
    x, y = images(100 * options.batch_size)
    to_tensor = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean=MEAN, std=STD)])
    dataset = gluon.data.ArrayDataset(mx.nd.array(x, dtype="uint8"), y.astype("int32")).transform_first(to_tensor)
    loader = gluon.data.DataLoader(dataset, batch_size=options.batch_size, shuffle=True)
    net = network()
    net.initialize(mx.init.Xavier())
    if options.hybridize:
        net.hybridize()
    run = steps(net, loader)
    for _ in range(options.warmup):
        next(run)
    started = time.monotonic()
    for _ in range(options.steps):
        next(run)
    print(json.dumps({"steps": options.steps, "seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
