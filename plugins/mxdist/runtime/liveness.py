"""How much memory a graph needs to train: which tensors live when, from its shapes alone.

A forward pass keeps what some operator's gradient is made of: a convolution its inputs, a ReLU its output, a sum
nothing. A backward pass goes through the operators from the last to the first, and holds a gradient for every tensor
that it has reached and not gone beyond; what the forward pass kept, MXNet keeps until it is over. Both are walked here
in the order in which MXNet runs them, with a count of who still needs each tensor; nothing is computed.

Which tensors a gradient needs is as MXNet 1.9 declares it (``FGradient`` of each operator: ``ElemwiseGradUseIn``,
``ElemwiseGradUseOut``, ``ElemwiseGradUseNone`` and the few that have rules of their own). An operator that is not known
here counts as one that keeps all its inputs and outputs.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mxnet as mx

_KEEP_INPUTS = {
    "Convolution", "Deconvolution", "FullyConnected", "dot", "batch_dot", "LayerNorm", "GroupNorm", "InstanceNorm",
    "elemwise_mul", "elemwise_div", "broadcast_mul", "broadcast_div", "erf", "square", "log", "abs", "gelu", "sin",
    "cos", "_power_scalar", "broadcast_power", "pick", "BatchNorm", "_contrib_BatchNormWithReLU", "_rdiv_scalar",
    "broadcast_minimum", "broadcast_maximum", "clip", "norm",
}  # fmt: skip
_KEEP_OUTPUTS = {"softmax", "log_softmax", "tanh", "sigmoid", "relu", "exp", "sqrt", "rsqrt", "Activation", "LRN"}
_KEEP_NOTHING = {
    "elemwise_add", "elemwise_sub", "broadcast_add", "broadcast_sub", "broadcast_plus", "add_n", "_plus_scalar",
    "_minus_scalar", "_rminus_scalar", "_mul_scalar", "_div_scalar", "negative", "transpose", "Reshape", "Flatten",
    "expand_dims", "sum", "mean", "slice_axis", "slice", "Concat", "SliceChannel", "Cast", "broadcast_axis",
    "broadcast_like", "broadcast_to", "zeros_like", "_zeros", "ones_like", "_copy", "SwapAxis", "stack", "BlockGrad",
    "_contrib_arange_like", "_equal_scalar", "_not_equal_scalar", "broadcast_greater", "squeeze", "Pad", "Crop",
    "UpSampling", "Dropout", "argmax", "_arange", "Embedding", "SequenceMask", "where", "reshape_like",
}  # fmt: skip
_ALIASES = {"Reshape", "Flatten", "expand_dims", "_copy", "BlockGrad", "squeeze", "reshape_like"}
_IN_PLACE = {
    "Activation", "elemwise_add", "elemwise_sub", "broadcast_add", "_plus_scalar", "_minus_scalar", "_mul_scalar",
    "_div_scalar", "_rminus_scalar", "negative", "relu", "sigmoid", "tanh", "erf", "exp", "softmax", "elemwise_mul",
    "add_n", "square", "sqrt",
}  # fmt: skip
_PASS_ON = {"elemwise_add", "add_n", "_plus_scalar", "_minus_scalar", *_ALIASES}  # the gradient is the one that came
_NO_GRADIENT = {
    "zeros_like", "_zeros", "ones_like", "_contrib_arange_like", "_equal_scalar", "_not_equal_scalar", "_arange",
    "broadcast_greater", "BlockGrad", "argmax",
}  # fmt: skip

Shape = tuple[int, ...]
Key = tuple[int, int]


@dataclass(frozen=True)
class Memory:
    """What a step needs beside parameters and their gradients, in bytes.

    :param kept: held between the forward and the backward pass.
    :param peak: the most that lives at once; the kept ones are among them.
    """

    kept: int
    peak: int


class Graph:
    """A graph, with the shape of everything in it.

    :param symbol: what training runs.
    :param given: shapes of the inputs that are no parameters.
    :param itemsize: bytes of a number.
    :ivar shapes: of all inputs, parameters among them, by name.
    """

    def __init__(self, symbol: mx.sym.Symbol, given: Mapping[str, Shape], itemsize: int) -> None:
        inside = symbol.get_internals()
        arguments, outputs, auxiliary = symbol.infer_shape(**given)
        self.outputs: list[Shape] = outputs
        self.shapes: dict[str, Shape] = dict(zip(symbol.list_arguments(), arguments, strict=True))
        self.shapes |= dict(zip(symbol.list_auxiliary_states(), auxiliary, strict=True))
        document = json.loads(symbol.tojson())
        self.nodes: list[dict[str, Any]] = document["nodes"]
        self.heads = [self.key(head) for head in document["heads"]]
        shapes = iter(inside.infer_shape(**given)[1])
        names = deque(inside.list_outputs())
        self.sizes: list[list[int]] = []
        for node in self.nodes:
            name, sizes = names.popleft(), [math.prod(next(shapes)) * itemsize]
            while names and names[0].startswith(name[:-1]) and name.endswith("_output0"):  # outputs are numbered
                names.popleft()
                sizes.append(math.prod(next(shapes)) * itemsize)
            self.sizes.append(sizes * 2 if node["op"] == "Dropout" else sizes)  # its mask is not in the list

    @staticmethod
    def key(source: Iterable[int]) -> Key:
        """Return which output of which node an edge comes from."""
        number, output, *_ = source
        return number, output

    def sources(self, number: int) -> list[Key]:
        """Return what a node reads."""
        return [self.key(source) for source in self.nodes[number]["inputs"]]

    def kept(self, number: int) -> list[Key]:
        """Return what the gradient of a node is made of."""
        op, sources = self.nodes[number]["op"], self.sources(number)
        outputs = [(number, output) for output in range(len(self.sizes[number]))]
        if op in _KEEP_NOTHING:
            return outputs[1:] if op == "Dropout" else []
        if op in _KEEP_INPUTS:
            return sources
        return outputs if op in _KEEP_OUTPUTS else [*sources, *outputs]

    def memory(self, trained: set[str]) -> Memory:
        """Return what a forward and a backward pass need.

        :param trained: the parameters and inputs that have gradients.
        """
        return _Walk(self, trained).memory()


class _Buffer:
    """Some bytes, and how many still need them."""

    def __init__(self, size: int) -> None:
        self.size, self.users = size, 0


class _Walk:
    """One forward and one backward pass."""

    def __init__(self, graph: Graph, trained: set[str]) -> None:
        self._graph = graph
        self._live = self._peak = 0
        self._learns = self._find_learning(trained)
        self._operators = [number for number, node in enumerate(graph.nodes) if node["op"] != "null"]
        self._reads = Counter(source for number in self._operators for source in graph.sources(number))
        self._reads.update(graph.heads)
        self._keeps = Counter(key for number in self._operators if self._learns[number] for key in graph.kept(number))
        self._buffers: dict[Key, _Buffer] = {}

    def _find_learning(self, trained: set[str]) -> list[bool]:
        """Return for each node whether a gradient goes through it."""
        found: list[bool] = []
        for number, node in enumerate(self._graph.nodes):
            below = any(found[source] for source, _ in self._graph.sources(number))
            found.append(node["name"] in trained if node["op"] == "null" else below and node["op"] not in _NO_GRADIENT)
        return found

    def memory(self) -> Memory:
        """Walk, and return what was needed."""
        for number in self._operators:
            self._forward(number)
        kept = self._live
        pieces: dict[Key, list[_Buffer]] = defaultdict(list)
        for head in self._graph.heads:
            pieces[head].append(self._new(self._size(head)))
        for number in reversed(self._operators):
            if self._learns[number]:
                self._backward(number, pieces)
        return Memory(kept, self._peak)

    def _size(self, key: Key) -> int:
        return self._graph.sizes[key[0]][key[1]]

    def _new(self, size: int) -> _Buffer:
        self._live += size
        self._peak = max(self._peak, self._live)
        buffer = _Buffer(size)
        buffer.users = 1
        return buffer

    def _drop(self, buffer: _Buffer, times: int = 1) -> None:
        buffer.users -= times
        if not buffer.users:
            self._live -= buffer.size

    def _forward(self, number: int) -> None:
        graph, op = self._graph, self._graph.nodes[number]["op"]
        sources = graph.sources(number)
        first = self._buffers.get(sources[0]) if sources else None
        for output in range(len(graph.sizes[number])):
            key = (number, output)
            uses = self._reads[key] + self._keeps[key]
            if first is not None and op in _ALIASES:
                buffer = first
            elif first is not None and output == 0 and self._takes_over(op, first, key):
                buffer = first
            else:
                buffer = self._new(self._size(key))
                buffer.users = 0
            buffer.users += uses
            self._buffers[key] = buffer
            if not buffer.users:
                self._live -= buffer.size
        for source in sources:
            if source in self._buffers:
                self._drop(self._buffers[source])

    def _takes_over(self, op: str, first: _Buffer, key: Key) -> bool:
        """Return whether an operator writes over its input: nobody else needs it, and it fits."""
        return op in _IN_PLACE and first.users == 1 and first.size == self._size(key)

    def _backward(self, number: int, pieces: dict[Key, list[_Buffer]]) -> None:
        graph, op = self._graph, self._graph.nodes[number]["op"]
        arrived = [self._sum(pieces.pop((number, output), [])) for output in range(len(graph.sizes[number]))]
        head = arrived[0]
        for source in graph.sources(number):
            node = graph.nodes[source[0]]
            if not self._learns[source[0]] or (node["op"] == "null" and self._reads[source] == 1):
                continue  # the gradient of a parameter has its place already
            size = self._size(source)
            shared = head is not None and head.size == size
            if head is not None and shared and (op in _PASS_ON or (op in _IN_PLACE and head.users == 1)):
                head.users += 1
                pieces[source].append(head)
            else:
                pieces[source].append(self._new(size))
        for buffer in arrived:
            if buffer is not None:
                self._drop(buffer)

    def _sum(self, parts: list[_Buffer]) -> _Buffer | None:
        """Return the sum of the gradients that came from several readers, written over one of them."""
        if not parts:
            return None
        own = next((part for part in parts if part.users == 1), None) if len(parts) > 1 else parts[0]
        total = own or self._new(parts[0].size)
        for part in parts:
            if part is not total:
                self._drop(part)
        return total
