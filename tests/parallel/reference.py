"""A plain Gluon loop: one process, one device, nothing but mxnet and numpy. What mxdist must agree with.

``python reference.py CASE.json`` makes initial weights, trains, and writes both and the loss of every step.
"""

from __future__ import annotations

import json
import math
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn


class Net(gluon.HybridBlock):
    """A small convolutional network, written out."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(
                nn.Conv2D(4, 5, activation="relu"),
                nn.MaxPool2D(2),
                nn.Conv2D(8, 5, activation="relu"),
                nn.MaxPool2D(2),
                nn.Dense(16, activation="relu"),
            )
            self.output = nn.Dense(classes)

    def hybrid_forward(self, F, x):
        """Return the scores."""
        return self.output(self.features(x))


def initial_weights(shape: tuple[int, ...], classes: int) -> dict[str, np.ndarray]:
    """Return weights of a size that trains well, by standard names."""
    net = Net(classes)
    net.cast("float64")
    net.initialize()
    net(mx.nd.zeros((1, *shape), dtype="float64"))
    generator = np.random.RandomState(7)
    weights = {}
    for name, parameter in net._collect_params_with_prefix().items():
        fan_in = int(np.prod(parameter.shape[1:])) or 1
        weights[name] = generator.standard_normal(parameter.shape) / math.sqrt(fan_in)
    return weights


def learning_rate(case: dict, step: int, total: int) -> float:
    """Return the rate of step ``step`` (from 1): warm-up, then cosine, or a cut every few steps."""
    base, warmup = case["learning_rate"], case["warmup_steps"]
    if step <= warmup:
        return base * step / warmup
    if case["decay"] == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / (total - 1 - warmup)))
    if case["decay"] == "step":
        return base * case["factor"] ** ((step - 1 - warmup) // case["step_size"])
    return base


def clip(gradients: list, largest: float | None) -> None:
    """Scale gradients down to a global norm."""
    if largest is None:
        return
    norm = math.sqrt(sum(float((gradient.asnumpy() ** 2).sum()) for gradient in gradients))
    if norm > largest:
        for gradient in gradients:
            gradient[:] = gradient * (largest / norm)


def train(case: dict, x: np.ndarray, y: np.ndarray, weights: dict[str, np.ndarray]) -> tuple[dict, list[float]]:
    """Train and return the weights and the loss of each step."""
    net = Net(int(y.max()) + 1)
    net.cast("float64")
    net.initialize()
    net(mx.nd.zeros((1, *x.shape[1:]), dtype="float64"))
    parameters = net._collect_params_with_prefix()
    for name, parameter in parameters.items():
        parameter.set_data(mx.nd.array(weights[name], dtype="float64"))
    trainer = gluon.Trainer(net.collect_params(), case["optimizer"], case["arguments"], kvstore=None)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    batch, losses, step = case["batch_size"], [], 0
    total = case["epochs"] * math.ceil(len(x) / batch)
    for epoch in range(case["epochs"]):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([case["seed"], epoch])))
        order = generator.permutation(len(x))
        for start in range(0, len(x), batch):
            rows, step = order[start : start + batch], step + 1
            data = mx.nd.array(x[rows].astype(np.float64) / 255, dtype="float64")
            label = mx.nd.array(y[rows], dtype="float64")
            with autograd.record():
                loss = loss_function(net(data), label).mean()
            loss.backward()
            clip([parameter.grad() for parameter in parameters.values()], case["clip_norm"])
            trainer.set_learning_rate(learning_rate(case, step, total))
            trainer.step(1)
            losses.append(float(loss.asscalar()))
    return {name: parameter.data().asnumpy() for name, parameter in parameters.items()}, losses


def main() -> None:
    """Run one case."""
    with open(sys.argv[1]) as file:
        case = json.load(file)
    with np.load(case["data"]) as data:
        x, y = data["x"], data["y"]
    weights = initial_weights(x.shape[1:], int(y.max()) + 1)
    np.savez(case["initial"], **weights)
    trained, losses = train(case, x, y, weights)
    np.savez(case["trained"], losses=np.array(losses), **trained)


if __name__ == "__main__":
    main()
