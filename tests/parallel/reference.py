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


class NormNet(Net):
    """The same with BatchNorm after each convolution."""

    def __init__(self, classes: int, frozen: bool) -> None:
        super().__init__(classes)
        with self.name_scope():
            self.features = nn.HybridSequential()
            for channels in (4, 8):
                self.features.add(
                    nn.Conv2D(channels, 5),
                    nn.BatchNorm(use_global_stats=frozen),
                    nn.Activation("relu"),
                    nn.MaxPool2D(2),
                )
            self.features.add(nn.Dense(16, activation="relu"))


class Mlp(Net):
    """Two hidden layers."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(nn.Dense(16, activation="relu"), nn.Dense(16, activation="relu"))


class Encoder(gluon.Block):
    """A BERT of 2 layers, 8 units, 2 heads, written as its formulas; token 0 is padding."""

    def __init__(self, classes: int, layers: int = 2, units: int = 8, heads: int = 2, hidden: int = 12) -> None:
        super().__init__()
        self.layers, self.heads, self.width = layers, heads, units // heads
        square, wide = (units, units), (hidden, units)
        shapes = {
            "embeddings.word_embeddings.weight": (20, units),
            "embeddings.position_embeddings.weight": (9, units),
            "embeddings.token_type_embeddings.weight": (2, units),
        }
        shapes |= self.norm("embeddings", units)
        for layer in range(layers):
            name = f"encoder.layer.{layer}"
            for part in ("query", "key", "value"):
                shapes |= self.linear(f"{name}.attention.self.{part}", square)
            shapes |= self.linear(f"{name}.attention.output.dense", square)
            shapes |= self.norm(f"{name}.attention.output", units)
            shapes |= self.linear(f"{name}.intermediate.dense", wide)
            shapes |= self.linear(f"{name}.output.dense", (units, hidden))
            shapes |= self.norm(f"{name}.output", units)
        shapes |= self.linear("pooler.dense", square) | self.linear("classifier", (classes, units))
        self.table = {name: self.params.get(name.replace(".", "_"), shape=shape) for name, shape in shapes.items()}

    @staticmethod
    def linear(name, shape):
        """Return the shapes of a matrix and its bias."""
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    @staticmethod
    def norm(name, units):
        """Return the shapes of a normalisation."""
        return {f"{name}.LayerNorm.weight": (units,), f"{name}.LayerNorm.bias": (units,)}

    def _collect_params_with_prefix(self, prefix=""):
        return self.table

    def forward(self, tokens):
        """Return the scores."""
        p = {name: parameter.data() for name, parameter in self.table.items()}

        def linear(name, x):
            return mx.nd.dot(x, p[f"{name}.weight"].T) + p[f"{name}.bias"]

        def norm(name, x):
            centred = x - x.mean(axis=-1, keepdims=True)
            scale = ((centred**2).mean(axis=-1, keepdims=True) + 1e-12).sqrt()
            return centred / scale * p[f"{name}.LayerNorm.weight"] + p[f"{name}.LayerNorm.bias"]

        rows = []
        for sequence in tokens:  # one at a time: padding is cut off instead of masked
            ids = sequence.asnumpy().astype(int)
            seen = int((ids != 0).sum())
            words = p["embeddings.word_embeddings.weight"][mx.nd.array(ids[:seen], dtype="int32")]
            x = words + p["embeddings.position_embeddings.weight"][:seen]
            x = norm("embeddings", x + p["embeddings.token_type_embeddings.weight"][0:1])
            for layer in range(self.layers):
                name = f"encoder.layer.{layer}"
                q, k, v = (linear(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
                found = []
                for head in range(self.heads):
                    begin, end = head * self.width, (head + 1) * self.width
                    qh, kh, vh = (mx.nd.slice_axis(each, axis=1, begin=begin, end=end) for each in (q, k, v))
                    found.append(mx.nd.dot(mx.nd.softmax(mx.nd.dot(qh, kh.T) / math.sqrt(self.width)), vh))
                attended = linear(f"{name}.attention.output.dense", mx.nd.concat(*found, dim=1))
                x = norm(f"{name}.attention.output", x + attended)
                inner = linear(f"{name}.intermediate.dense", x)
                inner = inner * 0.5 * (1 + mx.nd.erf(inner / math.sqrt(2)))
                x = norm(f"{name}.output", x + linear(f"{name}.output.dense", inner))
            rows.append(linear("classifier", mx.nd.tanh(linear("pooler.dense", x[0:1]))))
        return mx.nd.concat(*rows, dim=0)


def freeze(layer: gluon.Block) -> None:
    """Let a BatchNorm use its running statistics."""
    if isinstance(layer, nn.BatchNorm):
        layer._kwargs["use_global_stats"] = True


def build(case: dict, classes: int) -> gluon.Block:
    """Return the network of a case."""
    kind = case.get("network", "lenet")
    if kind in ("resnet", "resnet_frozen"):
        resnet = gluon.model_zoo.vision.ResNetV1
        block = gluon.model_zoo.vision.BasicBlockV1
        net = resnet(block, [1, 1], [4, 4, 8], classes=classes, thumbnail=True)
        if kind == "resnet_frozen":
            net.apply(freeze)
        return net
    if kind == "encoder":
        return Encoder(classes)
    if kind == "mlp":
        return Mlp(classes)
    return Net(classes) if kind == "lenet" else NormNet(classes, frozen=kind == "lenet_frozen")


def prepared(x: np.ndarray) -> mx.nd.NDArray:
    """Return inputs as a network takes them: bytes are scaled, token ids are not."""
    return mx.nd.array(x.astype(np.float64) / (255 if x.dtype == np.uint8 else 1), dtype="float64")


def initial_weights(case: dict, x: np.ndarray, classes: int) -> dict[str, np.ndarray]:
    """Return weights of a size that trains well, by standard names."""
    net = build(case, classes)
    net.cast("float64")
    net.initialize()
    net(prepared(x[:1]))
    generator = np.random.RandomState(7)
    weights = {}
    for name, parameter in net._collect_params_with_prefix().items():
        fan_in = int(np.prod(parameter.shape[1:])) or 1
        weights[name] = generator.standard_normal(parameter.shape) / math.sqrt(fan_in)
        if name.endswith("running_var"):
            weights[name] = np.abs(weights[name]) + 0.5
    return weights


def learning_rate(case: dict, step: int, total: int) -> float:
    """Return the rate of step ``step`` (from 1): warm-up, then cosine, or a cut every few steps."""
    base, warmup = case["learning_rate"], case["warmup_steps"]
    if step <= warmup:
        first = case.get("warmup_from", 0.0) * base
        return first + (base - first) * step / warmup
    if case["decay"] == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / (total - 1 - warmup)))
    if case["decay"] == "step":
        return base * case["factor"] ** ((step - 1 - warmup) // case["step_size"])
    return base


def clip(gradients: list, largest: float | None) -> float:
    """Scale gradients down to a global norm; return what it was."""
    norm = math.sqrt(sum(float((gradient.asnumpy() ** 2).sum()) for gradient in gradients))
    if largest is not None and norm > largest:
        for gradient in gradients:
            gradient[:] = gradient * (largest / norm)
    return norm


def train(case: dict, x: np.ndarray, y: np.ndarray, weights: dict[str, np.ndarray]) -> tuple[dict, list, list]:
    """Train and return the weights, and the loss and the gradient's norm of each step."""
    net = build(case, int(y.max()) + 1)
    net.cast("float64")
    net.initialize()
    net(prepared(x[:1]))
    parameters = net._collect_params_with_prefix()
    for name, parameter in parameters.items():
        parameter.set_data(mx.nd.array(weights[name], dtype="float64"))
    trainer = gluon.Trainer(net.collect_params(), case["optimizer"], case["arguments"], kvstore=None)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    batch, losses, norms, step = case["batch_size"], [], [], 0
    total = case["epochs"] * math.ceil(len(x) / batch)
    for epoch in range(case["epochs"]):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([case["seed"], epoch])))
        order = generator.permutation(len(x))
        for start in range(0, len(x), batch):
            rows, step = order[start : start + batch], step + 1
            data = prepared(x[rows])
            label = mx.nd.array(y[rows], dtype="float64")
            with autograd.record():
                loss = loss_function(net(data), label).mean()
            loss.backward()
            gradients = [parameter.grad() for parameter in parameters.values() if parameter.grad_req != "null"]
            norms.append(clip(gradients, case["clip_norm"]))
            trainer.set_learning_rate(learning_rate(case, step, total))
            trainer.step(1)
            losses.append(float(loss.asscalar()))
    return {name: parameter.data().asnumpy() for name, parameter in parameters.items()}, losses, norms


def main() -> None:
    """Run one case."""
    with open(sys.argv[1]) as file:
        case = json.load(file)
    with np.load(case["data"]) as data:
        x, y = data["x"], data["y"]
    weights = initial_weights(case, x, int(y.max()) + 1)
    np.savez(case["initial"], **weights)
    trained, losses, norms = train(case, x, y, weights)
    np.savez(case["trained"], losses=np.array(losses), norms=np.array(norms), **trained)


if __name__ == "__main__":
    main()
