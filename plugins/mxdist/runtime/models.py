"""The networks that mxdist brings. Images are (channels, height, width); parameters of a job choose their sizes.

Each has its layers in ``features`` and its output layer in ``output``, as in Gluon's model zoo: that is the head which
a fine-tuning may replace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon import nn

from mxdist.errors import Problem, SpecError


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


def lenet(classes: int, *, channels: int = 20, hidden: int = 128) -> Network:
    """LeNet, as used today: two convolutions with pooling, one hidden layer."""
    return Network(
        [
            nn.Conv2D(channels, 5, activation="relu"),
            nn.MaxPool2D(2),
            nn.Conv2D(2 * channels, 5, activation="relu"),
            nn.MaxPool2D(2),
            nn.Dense(hidden, activation="relu"),
        ],
        classes,
    )


def mlp(classes: int, *, hidden: int = 128, layers: int = 2) -> Network:
    """Fully connected layers over the flattened input."""
    return Network([nn.Dense(hidden, activation="relu") for _ in range(layers)], classes)


def cifar_cnn(classes: int, *, channels: int = 32) -> Network:
    """One convolution, one pooling, one fully connected layer: the small CNN of MXNet's guide."""
    return Network([nn.Conv2D(channels, 3, activation="relu"), nn.MaxPool2D(2)], classes)


_BUILDERS: dict[str, Callable[..., Network]] = {"cifar_cnn": cifar_cnn, "lenet": lenet, "mlp": mlp}


def build(name: str, params: Mapping[str, Any]) -> Network:
    """Return the network ``name``.

    :param params: ``classes``, and whatever the network takes by name.
    :raises SpecError: it does not take one of them.
    """
    builder = _BUILDERS[name]
    known = builder.__kwdefaults__ or {}
    problems = [
        Problem(f"model.params.{key}", f"{name} has no such parameter; known are classes, {', '.join(sorted(known))}")
        for key in params
        if key != "classes" and key not in known
    ]
    sizes = {}
    for key, value in params.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(Problem(f"model.params.{key}", f"must be a whole number from 1, not {value!r}"))
        sizes[key] = value
    if problems:
        raise SpecError("The job", problems)
    return builder(sizes.pop("classes"), **sizes)
