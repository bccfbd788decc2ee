"""One process, several devices: a replica of the network on each, and one optimizer.

The rows of a share are divided among the devices, also when there are fewer rows than devices. The first device has the
network itself: gradients are summed there, before anything looks at them, and only there is an update made. Before each
step the other replicas take its weights. Between ranks, Horovod sees the first device alone: it would reduce the
gradients of one device of a process and leave the others as they are, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
from mxnet import autograd

from mxdist.errors import TrainingFailed
from mxdist.runtime import network
from mxdist.runtime.batches import Batch
from mxdist.runtime.parallel.base import Group, digest_arrays
from mxdist.runtime.parallel.layout import Layout, divide, take
from mxdist.runtime.update import Update


@dataclass(frozen=True)
class Replica:
    """The sum of the loss on one device.

    :param graph: called with inputs and targets.
    :param sources: the arrays of the first device that this one copies, beside its own; both empty on the first.
    :param gradients: in the order of the updater's.
    """

    device: mx.Context
    graph: Any
    sources: Sequence[mx.nd.NDArray]
    copies: Sequence[mx.nd.NDArray]
    gradients: Sequence[mx.nd.NDArray]


class Devices(Layout):
    """A replica of the network on each device of this rank.

    :param graph: the sum of the loss over a share, on the first device.
    :param net: the network inside it.
    :param devices: of this rank.
    """

    def __init__(
        self,
        graph: network.LossSum,
        net: mx.gluon.HybridBlock,
        updater: Update,
        group: Group,
        devices: Sequence[mx.Context],
    ) -> None:
        super().__init__(updater, group)
        first = Replica(devices[0], graph, (), (), updater.gradients)
        self.replicas = [first, *_copies(graph, net, updater, devices[1:])]

    def backward(self, batch: Batch) -> mx.nd.NDArray | None:
        """Compute each device's part of the rows, and sum the gradients on the first device."""
        if not batch.rows:
            for gradient in self.updater.gradients:
                gradient[:] = 0
            return None
        self._refresh()
        busy = list(zip(self.replicas, divide(batch.rows, len(self.replicas)), strict=False))
        losses = [self._part(replica, batch, rows) for replica, rows in busy]  # none waits for another
        for replica, _ in busy[1:]:
            for total, gradient in zip(self.updater.gradients, replica.gradients, strict=True):
                total += gradient.as_in_context(total.context)
        first = self.replicas[0].device
        return mx.nd.add_n(*[loss.as_in_context(first) for loss in losses])

    def gather(self, *, state: bool = True) -> None:
        """Make sure that all replicas have the weights of the first.

        :raises TrainingFailed: one has others.
        """
        self._refresh()
        for replica in self.replicas[1:]:
            if _digest(replica.copies) != _digest(replica.sources):
                raise TrainingFailed(
                    f"the weights on {replica.device} differ from those on {self.replicas[0].device}.",
                    rank=self.group.rank,
                    hint="A copy from device to device went wrong: look at the hardware, or train on one device.",
                    retryable=False,
                )

    def _part(self, replica: Replica, batch: Batch, rows: slice) -> mx.nd.NDArray:
        x, y = (array.as_in_context(replica.device) for array in take(batch, rows))
        with autograd.record():
            loss: mx.nd.NDArray = replica.graph(x, y)
        loss.backward(self.weight(batch.total, replica.device))
        return loss

    def _refresh(self) -> None:
        """Let the replicas take the first device's weights: after an update, a checkpoint, a broadcast."""
        for replica in self.replicas[1:]:
            for source, copy in zip(replica.sources, replica.copies, strict=True):
                source.copyto(copy)


def _copies(
    graph: network.LossSum, net: mx.gluon.HybridBlock, updater: Update, devices: Sequence[mx.Context]
) -> Iterator[Replica]:
    """Yield the graph again on each device, with parameters of its own."""
    stored = graph.forward_block.example(mx.cpu()).dtype
    x = mx.sym.var("mxdist_x", dtype=stored)
    y = mx.sym.var("mxdist_y", dtype=updater.gradients[0].dtype)
    symbol = graph(x, y)
    parameters = {parameter.name: parameter for parameter in graph.collect_params().values()}
    trained = [parameter.name for parameter in network.trainable(net).values()]
    for device in devices:
        block = mx.gluon.SymbolBlock(symbol, [x, y])
        own = block.collect_params()
        for name, parameter in own.items():
            _initialise(parameter, parameters[name], device)
        block.hybridize(static_alloc=True, static_shape=True)
        yield Replica(
            device=device,
            graph=block,
            sources=[parameters[name].data() for name in own],
            copies=[parameter.data(device) for parameter in own.values()],
            gradients=[own[name].grad(device) for name in trained],
        )


def _initialise(parameter: mx.gluon.Parameter, like: mx.gluon.Parameter, device: mx.Context) -> None:
    parameter.shape = like.shape
    parameter.cast(like.dtype)
    parameter.grad_req = like.grad_req
    parameter.initialize(mx.init.Zero(), ctx=device, force_reinit=True)


def _digest(arrays: Sequence[mx.nd.NDArray]) -> str:
    return digest_arrays({str(number): array for number, array in enumerate(arrays)})
