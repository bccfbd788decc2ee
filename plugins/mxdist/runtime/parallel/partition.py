"""Where a network can be cut, and where it is cut: into consecutive stages.

A block is a *chain* if it does nothing but call its children one after the other. That is not guessed from its class:
its graph is compared with the graph of that very call. So ``HybridSequential`` is a chain, and so are networks with
``features`` and ``output`` as in Gluon's model zoo, and any block of a recipe that is written that way; a residual
block, an attention, a layer with an activation inside are not, and are never cut. Chains inside of chains are opened;
what is left is a sequence of layers, each by its standard name (``features.4``).

A network that does more between its layers may say itself what its layers are, by a method ``chain()`` that returns
pairs of a name and a block; a block whose ``takes_inputs`` is true is called with the network's inputs as well (a mask
that every layer of a Transformer needs is then made anew by each stage). That, too, is compared with its graph.

A cut is named by the layer that the next stage begins with; the name of a chain stands for its first layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mxnet as mx

from mxdist.errors import Problem, SpecError
from mxdist.runtime import network
from mxdist.spec import Parallelism

_SHOWN = 40


@dataclass(frozen=True)
class Layer:
    """One part that is never cut.

    :param name: its standard name; "" for a network that is one layer.
    :param also: the chains that begin with it.
    """

    name: str
    block: mx.gluon.HybridBlock
    also: tuple[str, ...] = ()

    @property
    def takes_inputs(self) -> bool:
        """Whether it is called with the network's inputs, too."""
        return bool(getattr(self.block, "takes_inputs", False))

    def __call__(self, x: Any, inputs: Any) -> Any:
        """Return its output.

        :param x: of the layer before.
        :param inputs: of the network.
        """
        return self.block(x, inputs) if self.takes_inputs else self.block(x)


def layers_of(net: mx.gluon.HybridBlock) -> list[Layer]:
    """Return the layers of a network, in the order in which they are called."""
    declared = getattr(net, "chain", None)
    if callable(declared):
        layers = [Layer(name, block) for name, block in declared()]
        return layers if _same([Layer("", net)], layers) else [Layer("", net)]
    return chain(net)


def chain(net: mx.gluon.HybridBlock, name: str = "", also: tuple[str, ...] = ()) -> list[Layer]:
    """Return the layers of a block, by calling its children one after the other.

    :param name: its standard name.
    :param also: the chains that begin with it.
    """
    children = dict(net._children.items())
    if not children or not _same([Layer("", net)], [Layer(key, block) for key, block in children.items()]):
        return [Layer(name, net, also)]
    names = also if not name else (*also, name)
    found: list[Layer] = []
    for child, block in children.items():
        found += chain(block, f"{name}.{child}" if name else child, () if found else names)
    return found


def begin(layers: Sequence[Layer], parallelism: Parallelism, costs: Sequence[float] | None) -> list[int]:
    """Return the first layer of each stage.

    :param costs: of each layer; needed unless there are explicit cuts.
    :raises SpecError: the network cannot be cut like that; with all that is wrong, and the layers that there are.
    """
    if parallelism.cuts:
        return _at(layers, parallelism.cuts)
    stages = parallelism.stage_count
    if stages > len(layers):
        _refuse(layers, [Problem("parallelism.stages", f"there are {len(layers)} layers for {stages} stages")])
    whole = _inseparable(layers)
    if stages > len(whole):
        one, other = max(_sharing(layers), key=lambda pair: pair[1] - pair[0])
        what = f"{layers[one].name} and {layers[other].name} share a parameter, so they belong to one stage"
        raise SpecError("The job", [Problem("parallelism.stages", f"{what}: {len(whole)} can be made, not {stages}")])
    each = [1.0] * len(layers) if costs is None else costs
    return [whole[part][0] for part in balanced([sum(each[number] for number in part) for part in whole], stages)]


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Return where each of ``parts`` consecutive parts begins, so that the largest sum of costs is the least possible.

    Dynamic programming over (parts, layers); of equally good partitions, the one whose last parts begin first.
    """
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    least = [sums]  # least[k][i]: the largest of k + 1 parts of the first i layers
    begins: list[list[int]] = []
    for done in range(1, parts):
        worst, where = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(done + 1, count + 1):
            worst[end], where[end] = min(
                (max(least[-1][start], sums[end] - sums[start]), start) for start in range(done, end)
            )
        least.append(worst)
        begins.append(where)
    found, end = [], count
    for where in reversed(begins):
        end = where[end]
        found.append(end)
    return [0, *reversed(found)]


def check_separate(layers: Sequence[Layer], begins: Sequence[int]) -> None:
    """Refuse a cut between layers that share a parameter: each stage has its own.

    :raises SpecError: naming the layers.
    """
    stage_of = [sum(first <= number for first in begins) - 1 for number in range(len(layers))]
    problems = {
        f"{layers[one].name} and {layers[other].name} share a parameter, but are in stages {stage_of[one]} and "
        f"{stage_of[other]}": None
        for one, other in _sharing(layers)
        if stage_of[one] != stage_of[other]
    }
    if problems:
        raise SpecError("The job", [Problem("parallelism.cuts", what) for what in problems])


def _sharing(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """Return the pairs of layers that share a parameter, each with the first one that has it."""
    first: dict[int, int] = {}
    return [
        (first[id(parameter)], number)
        for number, layer in enumerate(layers)
        for parameter in layer.block.collect_params().values()
        if first.setdefault(id(parameter), number) != number
    ]


def _inseparable(layers: Sequence[Layer]) -> list[range]:
    """Return the parts that can be stages: layers that share a parameter, and all between them, stay together."""
    earliest = list(range(len(layers)))
    for one, other in _sharing(layers):
        earliest[other] = min(earliest[other], one)
    begins: list[int] = []
    for number, bound in enumerate(earliest):
        begins.append(number)
        while begins[-1] > bound:
            begins.pop()
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(layers)], strict=True)]


def parameter_bytes(layers: Sequence[Layer]) -> list[float]:
    """Return the bytes of each layer's parameters."""
    return [
        float(sum(p.data().size * p.data().dtype(0).itemsize for p in layer.block.collect_params().values()))
        for layer in layers
    ]


def graph_of(layers: Sequence[Layer]) -> mx.sym.Symbol:
    """Return the graph of layers called one after the other on ``data``."""
    x = inputs = mx.sym.var("data")
    for layer in layers:
        x = layer(x, inputs)
    return x


def _at(layers: Sequence[Layer], cuts: Sequence[str]) -> list[int]:
    numbers = {name: number for number, layer in enumerate(layers) for name in (layer.name, *layer.also)}
    problems: list[Problem] = []
    begins = [0]
    for index, name in enumerate(cuts):
        path = f"parallelism.cuts.{index}"
        if name not in numbers:
            problems.append(Problem(path, f"there is no layer {name!r} to cut at"))
        elif numbers[name] == 0:
            problems.append(Problem(path, f"{name} is the beginning of the network: nothing would be before the cut"))
        elif numbers[name] <= begins[-1]:
            problems.append(Problem(path, f"{name} does not come after {layers[begins[-1]].name}: name cuts in order"))
        else:
            begins.append(numbers[name])
    if problems:
        _refuse(layers, problems)
    return begins


def _refuse(layers: Sequence[Layer], problems: list[Problem]) -> None:
    """Raise the problems, each with the names that exist."""
    names = [layer.name for layer in layers if layer.name]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    there = f"; the layers are {shown}" if names else "; this network does not call its layers one after the other"
    raise SpecError("The job", [Problem(problem.path, problem.message + there) for problem in problems])


def _same(some: Sequence[Layer], others: Sequence[Layer]) -> bool:
    """Return whether two ways to call layers compute the same."""
    known: dict[Any, int] = {}
    try:
        return _meaning(graph_of(some), known) == _meaning(graph_of(others), known)
    except Exception:  # a child that takes two inputs, a block that returns two: whatever it says, it is not a chain
        return False


def _meaning(graph: mx.sym.Symbol, known: dict[Any, int]) -> list[tuple[int, int]]:
    """Return what a graph computes: numbers that are equal for equal expressions.

    :param known: the number of each expression. The names of operators do not count, nor how often it is computed.
    """
    document = json.loads(graph.tojson())
    numbers: list[int] = []
    for node in document["nodes"]:
        attributes = sorted((k, v) for k, v in node.get("attrs", {}).items() if not k.startswith("__"))
        name = node["name"] if node["op"] == "null" else ""
        sources = tuple((numbers[source], output) for source, output, *_ in node["inputs"])
        numbers.append(known.setdefault((node["op"], name, tuple(attributes), sources), len(known)))
    return [(numbers[node], output) for node, output, *_ in document["heads"]]


def names_of(net: mx.gluon.Block, layers: Sequence[Layer]) -> dict[str, mx.gluon.Parameter]:
    """Return the parameters of some layers by their standard names in the whole network."""
    own = {id(parameter) for layer in layers for parameter in layer.block.collect_params().values()}
    return {name: parameter for name, parameter in network.parameters(net).items() if id(parameter) in own}
