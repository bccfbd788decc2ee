"""What is known of any network: names of its parameters, its head, its normalisation, its randomness."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon.nn.basic_layers import _BatchNorm

from mxdist.errors import Problem, SpecError
from mxdist.runtime.parallel.base import Group
from mxdist.runtime.recipe import Recipe
from mxdist.spec import DType

_RANDOM_OPS = re.compile(r"dropout|^_?(random|sample)|npi_.*(normal|uniform)|shuffle|multinomial", re.IGNORECASE)


class Forward(mx.gluon.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """From stored inputs to the network's output: preprocessing, then the network.

    :param shape: of one example, as stored.
    :param stored: its type, as stored.
    """

    def __init__(
        self, recipe: Recipe, net: mx.gluon.HybridBlock, *, dtype: DType, stored: str, shape: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.net = net
        self._recipe = recipe
        self._dtype, self._stored, self._shape = dtype, stored, shape

    @property
    def recipe(self) -> Recipe:
        """What prepares the inputs."""
        return self._recipe

    @property
    def dtype(self) -> DType:
        """Of the network's inputs, weights and outputs."""
        return self._dtype

    @property
    def stored(self) -> str:
        """The type of an example, as stored."""
        return self._stored

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example, as stored."""
        return self._shape

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Return the network's output for stored inputs."""
        return self.net(self.inputs(F, x))

    def inputs(self, F: Any, x: Any) -> Any:
        """Return stored inputs as the network takes them."""
        return self._recipe.prepare(F, x, dtype=self._dtype.value, stored=self._stored, shape=self._shape)

    def example(self, device: mx.Context) -> mx.nd.NDArray:
        """Return one example of zeros, as stored."""
        return mx.nd.zeros((1, *self._shape), ctx=device, dtype=self._stored)


class LossSum(mx.gluon.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """The sum of the loss over the rows of a share, as one graph."""

    def __init__(self, forward: Forward, loss: mx.gluon.HybridBlock) -> None:
        super().__init__()
        self.forward_block = forward
        self.loss = loss

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:
        """Return the sum of the loss of all rows."""
        return F.sum(self.loss(self.forward_block(x), y))

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Become one graph, unless a layer can only run imperatively: then no block does."""
        super().hybridize(active and not exchanging(self), **options)

    def join(self, device: mx.Context) -> None:
        """Take part, without rows, in what the layers of all ranks exchange; leaves gradients of zero."""
        meeting = exchanging(self)
        if not meeting:
            return
        for layer in meeting:
            layer.has_rows = False
        x = self.forward_block.example(device)
        with autograd.record():
            output = self.forward_block(x)
        output.backward(mx.nd.zeros_like(output))
        for layer in meeting:
            layer.has_rows = True

    def agree(self, group: Group) -> None:
        """Replace running statistics that each rank took from its own rows by their mean over all ranks."""
        for name, layer in layers(self):
            if getattr(layer, "drifts", False) and group.size > 1:
                for kind in ("running_mean", "running_var"):
                    statistics = getattr(layer, kind).data()
                    group.sum_named_(statistics, f"mxdist.batch_norm.{name}.{kind}")
                    statistics /= group.size


def parameters(net: mx.gluon.Block) -> dict[str, mx.gluon.Parameter]:
    """Return the parameters by their standard names (``features.0.weight``), in the order of the layers.

    A parameter that two layers share has the name that comes first.
    """
    found: dict[str, mx.gluon.Parameter] = {}
    seen: set[int] = set()
    for name, parameter in net._collect_params_with_prefix().items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found[name] = parameter
    return found


def arrays(net: mx.gluon.Block) -> dict[str, mx.nd.NDArray]:
    """Return the values of all parameters, running statistics among them, by standard name."""
    return {name: parameter.data() for name, parameter in parameters(net).items()}


def trainable(net: mx.gluon.Block) -> dict[str, mx.gluon.Parameter]:
    """Return the parameters that have gradients."""
    return {name: parameter for name, parameter in parameters(net).items() if parameter.grad_req != "null"}


def layers(net: mx.gluon.Block, prefix: str = "") -> Iterator[tuple[str, mx.gluon.Block]]:
    """Yield every block with its standard name, parents before children."""
    yield prefix, net
    for name, child in net._children.items():
        yield from layers(child, f"{prefix}.{name}" if prefix else name)


def exchanging(net: mx.gluon.Block) -> list[Any]:
    """Return the layers that talk to other ranks within a pass, such as synchronised BatchNorm."""
    return [layer for _, layer in layers(net) if getattr(layer, "has_rows", None) is not None]


def head(net: mx.gluon.Block) -> tuple[str, ...]:
    """Return the names of the output layer's parameters.

    That is the child called ``output`` (as in Gluon's model zoo), else the last layer that has parameters of its own.
    """
    names = tuple(parameters(net))
    if "output" in net._children and any(name.startswith("output.") for name in names):
        return tuple(name for name in names if name.startswith("output."))
    last = [name for name, layer in layers(net) if layer._reg_params][-1]
    return tuple(name for name in names if name.rpartition(".")[0] == last)


def prepare(net: mx.gluon.HybridBlock, *, dtype: DType, device: mx.Context) -> None:
    """Give the network its precision and device, and initialise what the recipe did not.

    Gradients are the loop's: it sums what it accumulates by itself, so a parameter that adds to its gradient (``add``)
    is told to replace it, or those of all earlier steps would count again.
    """
    net.cast(dtype.value)
    every = list(net.collect_params().values())
    _refuse_sparse(net)
    for parameter in every:
        if parameter.grad_req == "add":
            parameter.grad_req = "write"
    fresh = [parameter for parameter in every if not _initialised(parameter)]
    if len(fresh) == len(every):
        net.initialize(mx.init.Xavier(), ctx=device)
        return
    for parameter in fresh:
        parameter.initialize(ctx=device, default_init=mx.init.Xavier())
    net.collect_params().reset_ctx(device)


def _refuse_sparse(net: mx.gluon.Block) -> None:
    """Refuse parameters and gradients that keep only some of their rows: nothing here can sum or save them.

    :raises SpecError: naming them.
    """
    sparse = [name for name, one in parameters(net).items() if {one._stype, one._grad_stype} != {"default"}]
    if sparse:
        problem = f"{', '.join(sparse[:5])}: sparse parameters and gradients are not taken; set sparse_grad=False"
        raise SpecError("The job", [Problem("model", problem)])


def _initialised(parameter: mx.gluon.Parameter) -> bool:
    return parameter._data is not None or bool(parameter._deferred_init)


def check_loss(forward: Forward, loss: mx.gluon.HybridBlock, x: mx.nd.NDArray, y: mx.nd.NDArray) -> None:
    """Run a few examples through, which also gives deferred parameters their shapes.

    :raises SpecError: the loss is not one value for each example.
    """
    values = loss(forward(x), y)
    if values.shape[:1] != (len(x),) or values.size != len(x):
        problem = f"the loss of {len(x)} examples has shape {values.shape}; it must be one value for each"
        raise SpecError("The job", [Problem("model.recipe", problem)])


def local_batch_norms(net: mx.gluon.Block) -> list[str]:
    """Return the names of BatchNorm layers whose statistics would come from one rank's rows."""
    return [name for name, layer in layers(net) if is_batch_norm(layer) and not layer._kwargs["use_global_stats"]]


def is_batch_norm(layer: mx.gluon.Block) -> bool:
    """Return whether the layer is a batch normalisation, of any kind that Gluon has."""
    return isinstance(layer, _BatchNorm)


def random_ops(symbol: mx.sym.Symbol) -> list[str]:
    """Return the operators of the graph that draw random numbers."""
    nodes = json.loads(symbol.tojson())["nodes"]
    return sorted({node["op"] for node in nodes if _RANDOM_OPS.search(node["op"])})


def reseed(seed: int, rank: int, step: int) -> None:
    """Seed MXNet's and numpy's generators from where the training is: their state can be set but not read."""
    state = np.random.SeedSequence([seed, rank, step]).generate_state(1)
    mx.random.seed(int(state[0]))
    np.random.seed(int(state[0]))


def stale(names: Iterable[str], weights: Iterable[mx.nd.NDArray]) -> list[str]:
    """Return the parameters whose gradient no backward pass has written since they were marked."""
    return [name for name, weight in zip(names, weights, strict=True) if not weight._fresh_grad]
