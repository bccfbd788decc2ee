"""A network as stages: their graphs, where they live, what travels between them.

Preprocessing belongs to the first stage, the loss to the last. Every parameter gets its first value in host memory,
layer by layer and in the order of one process, so that it is the value that one process has; then each stage moves to
its device, and no device ever holds another stage's parameters.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
from mxnet import autograd

from mxdist.runtime import network
from mxdist.runtime.parallel import partition
from mxdist.runtime.parallel.base import Group
from mxdist.runtime.parallel.orders import Action
from mxdist.runtime.parallel.partition import Layer
from mxdist.spec import Parallelism
from mxdist.spec.parallelism import Balance

log = logging.getLogger(__name__)

_TIMES = 3

Shape = tuple[int, ...]


class StageGraph(mx.gluon.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """The layers of one stage, one after the other.

    :param prepare: what makes stored inputs fit for the network.
    :param first: inputs are stored ones. Another stage takes them as a second input if one of its layers wants them.
    """

    def __init__(self, layers: Sequence[Layer], prepare: Callable[[Any, Any], Any], *, first: bool) -> None:
        super().__init__()
        self._layers, self._prepare, self._first = tuple(layers), prepare, first
        for number, layer in enumerate(layers):
            self.register_child(layer.block, str(number))

    def hybrid_forward(self, F: Any, x: Any, stored: Any = None) -> Any:
        """Return what goes to the next stage."""
        inputs = None
        if self._first:
            x = inputs = self._prepare(F, x)
        elif stored is not None:
            inputs = self._prepare(F, stored)
        for layer in self._layers:
            x = layer(x, inputs)
        return x


class LastGraph(mx.gluon.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """The last stage while it trains: the sum of the loss over the rows."""

    def __init__(self, stage: StageGraph, loss: mx.gluon.HybridBlock) -> None:
        super().__init__()
        self.stage = stage
        self.loss = loss

    def hybrid_forward(self, F: Any, x: Any, y: Any, *stored: Any) -> Any:
        """Return the sum of the loss of all rows."""
        return F.sum(self.loss(self.stage(x, *stored), y))


@dataclass(frozen=True)
class Stage:
    """One part of the network.

    :param graph: from what comes in to what goes out.
    :param training: the same; for the last stage, to the sum of the loss, with targets as a second input.
    :param parameters: by standard name, running statistics among them.
    :param wants_inputs: it takes stored inputs beside what comes from the stage before.
    :param passes_on: gradients go on to the stage before, because something is trained there or earlier.
    """

    index: int
    count: int
    layers: tuple[str, ...]
    device: mx.Context
    graph: StageGraph
    training: mx.gluon.HybridBlock
    parameters: dict[str, mx.gluon.Parameter]
    wants_inputs: bool
    passes_on: bool

    @property
    def first(self) -> bool:
        """Whether inputs come from the dataset."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the loss is here."""
        return self.index == self.count - 1

    def stored(self, x: Any) -> tuple[Any, ...]:
        """Return the second input, if there is one, from stored inputs."""
        if not self.wants_inputs:
            return ()
        return (x.as_in_context(self.device) if isinstance(x, mx.nd.NDArray) else x,)

    @property
    def trained(self) -> dict[str, mx.gluon.Parameter]:
        """The parameters that have gradients."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.grad_req != "null"}

    @property
    def goes_back(self) -> bool:
        """Whether there is a backward pass."""
        return self.passes_on or bool(self.trained)


class Staged(network.Forward):
    """From stored inputs to the network's output, through the stages, wherever they are.

    As a graph it is the whole network, so an exported model knows nothing of stages.
    """

    def __init__(self, whole: network.Forward, stages: Sequence[Stage]) -> None:
        super().__init__(whole.recipe, whole.net, dtype=whole.dtype, stored=whole.stored, shape=whole.shape)
        self._stages = tuple(stages)

    def forward(self, x: Any, *rest: Any) -> Any:
        """Return the output, on the device of the inputs."""
        if not isinstance(x, mx.nd.NDArray):
            return super().forward(x, *rest)
        value = x
        for stage in self._stages:
            value = stage.graph(value.as_in_context(stage.device), *stage.stored(x))
        return value.as_in_context(x.context)


@dataclass
class Stages:
    """All stages of a network.

    :param dtype: of what travels between them.
    """

    stages: tuple[Stage, ...]
    forward: Staged
    dtype: str
    _shapes: dict[int, list[Shape]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stages)

    def shapes(self, rows: int) -> list[Shape]:
        """Return the shapes of what each stage but the last sends on for ``rows`` examples."""
        if rows not in self._shapes:
            x = stored = mx.sym.var("data")
            sent = []
            for stage in self.stages[:-1]:
                x = stage.graph(x, *stage.stored(stored))
                sent.append(x)
            shape = self.forward.example(mx.cpu()).shape[1:]
            self._shapes[rows] = mx.sym.Group(sent).infer_shape(data=(rows, *shape))[1] if sent else []
        return self._shapes[rows]

    def shape_of(self, action: Action, stage: int, rows: int) -> Shape:
        """Return the shape of what stage ``stage`` needs for an action on ``rows`` examples."""
        return self.shapes(rows)[stage - 1 if action.forward else stage]


def build(
    parallelism: Parallelism,
    forward: network.Forward,
    loss: mx.gluon.HybridBlock,
    x: mx.nd.NDArray,
    *,
    group: Group,
    devices: Sequence[mx.Context],
) -> Stages:
    """Cut a network that has its first values in host memory, and move each stage to its device.

    :param x: a few stored examples, in host memory.
    :param devices: of the stages; for those that live on other ranks, where this rank keeps its copy of the weights.
    :raises SpecError: the network cannot be cut like that.
    """
    layers = partition.layers_of(forward.net)
    begins = _begin(layers, parallelism, forward, x, group)
    partition.check_separate(layers, begins)
    ends = [*begins[1:], len(layers)]
    stages: list[Stage] = []
    for index, (start, end) in enumerate(zip(begins, ends, strict=True)):
        part = layers[start:end]
        graph = StageGraph(part, forward.inputs, first=index == 0)
        stages.append(
            Stage(
                index=index,
                count=len(begins),
                layers=tuple(layer.name for layer in part),
                device=devices[index],
                graph=graph,
                training=LastGraph(graph, loss) if index == len(begins) - 1 else graph,
                parameters=partition.names_of(forward.net, part),
                wants_inputs=index > 0 and any(layer.takes_inputs for layer in part),
                passes_on=any(stage.trained for stage in stages),
            )
        )
        graph.collect_params().reset_ctx(devices[index])
        stages[-1].training.hybridize()
    return Stages(tuple(stages), Staged(forward, stages), forward.dtype.value)


def _begin(
    layers: list[Layer], parallelism: Parallelism, forward: network.Forward, x: mx.nd.NDArray, group: Group
) -> list[int]:
    """Return the first layer of each stage: the same on every rank, and each time that a world asks."""
    costs: list[float] | None = None
    if not parallelism.cuts and parallelism.stage_count <= len(layers):
        costs = _costs(layers, parallelism.balance, forward, x, group)
    begins = partition.begin(layers, parallelism, costs)
    log.info("the stages begin with %s", ", ".join(layers[first].name or "the whole network" for first in begins))
    return begins


def _costs(
    layers: Sequence[Layer], balance: Balance, forward: network.Forward, x: mx.nd.NDArray, group: Group
) -> list[float]:
    """Return what each layer costs; only rank 0 measures time, once, while nobody else is at work."""
    if balance is Balance.PARAMETERS:
        return partition.parameter_bytes(layers)
    if balance is Balance.ACTIVATIONS:
        return _each(_activation_bytes, layers, forward, x)
    key = ("seconds", *[layer.name for layer in layers])
    seconds: list[float] = group.once(key, lambda: group.share(lambda: _each(_seconds, layers, forward, x)))
    return seconds


def _each(
    measure: Callable[[Layer, mx.nd.NDArray, mx.nd.NDArray], float],
    layers: Sequence[Layer],
    forward: network.Forward,
    x: mx.nd.NDArray,
) -> list[float]:
    costs = []
    value = inputs = forward.inputs(mx.nd, x)
    for layer in layers:
        costs.append(measure(layer, value, inputs))
        value = layer(value, inputs)
    return costs


def _activation_bytes(layer: Layer, x: mx.nd.NDArray, inputs: mx.nd.NDArray) -> float:
    """Return the bytes of all that a layer computes from one example, inside and at its end."""
    inside = layer(mx.sym.var("x"), mx.sym.var("inputs")).get_internals()
    given = {"x": (1, *x.shape[1:])} | ({"inputs": (1, *inputs.shape[1:])} if layer.takes_inputs else {})
    computed = [name for name in inside.list_outputs() if name not in set(inside.list_inputs())]
    shapes = dict(zip(inside.list_outputs(), inside.infer_shape(**given)[1], strict=True))
    size = sum(math.prod(shapes[name]) for name in computed)
    return float(size * x.dtype(0).itemsize)


def _seconds(layer: Layer, x: mx.nd.NDArray, inputs: mx.nd.NDArray) -> float:
    """Return the least time of a forward and a backward pass; what they leave behind is overwritten later."""
    best = float("inf")
    for _ in range(1 + _TIMES):
        value = x.copy()
        value.attach_grad()
        value.wait_to_read()
        began = time.perf_counter()
        with autograd.record(train_mode=False):  # running statistics stay as they are
            output = layer(value, inputs)
        output.backward()
        mx.nd.waitall()
        best = min(best, time.perf_counter() - began)
    return best
