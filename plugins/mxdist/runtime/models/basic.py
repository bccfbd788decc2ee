"""mxdist's own small networks for images; (channels, height, width).

Each has its layers in ``features`` and its output layer in ``output``, as in Gluon's model zoo: that is the head which
a fine-tuning may replace.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.gluon import nn


class Network(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """Layers, and an output layer on top.

    :param layers: of the backbone, in order.
    :param classes: outputs.
    """

    def __init__(self, layers: list[mx.gluon.HybridBlock], classes: int) -> None:
        super().__init__()
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(*layers)
            self.output = nn.Dense(classes)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Return one score for each class."""
        return self.output(self.features(x))


def lenet(classes: int, *, channels: int = 20, hidden: int = 128, batch_norm: bool = False) -> Network:
    """LeNet, as used today: two convolutions with pooling, one hidden layer.

    :param batch_norm: normalise the output of each convolution.
    """
    layers: list[mx.gluon.HybridBlock] = []
    for width in (channels, 2 * channels):
        if batch_norm:
            layers += [nn.Conv2D(width, 5), nn.BatchNorm(), nn.Activation("relu")]
        else:
            layers.append(nn.Conv2D(width, 5, activation="relu"))
        layers.append(nn.MaxPool2D(2))
    return Network([*layers, nn.Dense(hidden, activation="relu")], classes)


def mlp(classes: int, *, hidden: int = 128, layers: int = 2) -> Network:
    """Fully connected layers over the flattened input."""
    return Network([nn.Dense(hidden, activation="relu") for _ in range(layers)], classes)


def cifar_cnn(classes: int, *, channels: int = 32) -> Network:
    """One convolution, one pooling, one fully connected layer: the small CNN of MXNet's guide."""
    return Network([nn.Conv2D(channels, 3, activation="relu"), nn.MaxPool2D(2)], classes)
