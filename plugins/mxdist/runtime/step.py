"""One optimizer step on the global batch, however many ranks share it.

Each row's loss weighs ``1 / rows of the global batch``, on whichever rank the row is; the gradients of all ranks are
summed; so every rank holds the mean gradient of the global batch, and what follows (clipping, the update) is the same
on all. A rank without rows has a gradient of zero and takes part like the others.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import mxnet as mx
from mxnet import autograd

from mxdist.errors import Problem, SpecError
from mxdist.runtime import network
from mxdist.runtime.batches import Batch
from mxdist.runtime.parallel.base import Group
from mxdist.runtime.update import Update, square_sums


@dataclass(frozen=True)
class Trace:
    """What a step leaves on the device, to be looked at later.

    :param loss: sum of the loss over this rank's rows, or None if it had none.
    :param squares: sum of squares of this rank's gradient, per parameter; not finite if one of them is not.
    """

    loss: mx.nd.NDArray | None
    squares: mx.nd.NDArray | None
    rows: int
    total: int
    learning_rate: float


class Step:
    """Makes optimizer steps; never waits for the device.

    :param graph: the sum of the loss over a share, hybridized.
    """

    def __init__(self, graph: network.LossSum, update: Update, group: Group, device: mx.Context) -> None:
        self._graph = graph
        self._update = update
        self._group = group
        self._device = device
        self._weights: dict[int, mx.nd.NDArray] = {}
        self._checked = False

    def make(self, batch: Batch, number: int) -> Trace:
        """Make optimizer step ``number`` (from 1) on this rank's share of the batch."""
        loss = squares = None
        if batch.rows:
            loss = self._backward(batch) if self._checked else self._first_backward(batch)
            squares = square_sums(self._update.gradients)
        else:
            self._clear()
        self._reduce()
        learning_rate = self._update.apply(number)
        return Trace(loss, squares, batch.rows, batch.total, learning_rate)

    def _backward(self, batch: Batch) -> mx.nd.NDArray:
        with autograd.record():
            loss: mx.nd.NDArray = self._graph(batch.x, batch.y)
        loss.backward(self._weight(batch.total))
        return loss

    def _first_backward(self, batch: Batch) -> mx.nd.NDArray:
        """Refuse parameters that the loss does not depend on: their gradient would stay whatever it was."""
        self._checked = True
        for weight in self._update.weights:
            weight._fresh_grad = False
        with warnings.catch_warnings():  # Gluon says it too, but not by the names that a user knows
            warnings.filterwarnings("ignore", message="Parameter .* is not used by any computation")
            loss = self._backward(batch)
        names = network.stale(self._update.names, self._update.weights)
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            problem = f"the loss does not depend on {shown}; freeze them (init.freeze), or take them out of the network"
            raise SpecError("The job", [Problem("model", problem)])
        return loss

    def _weight(self, total: int) -> mx.nd.NDArray:
        """Return the gradient of the mean loss with respect to the sum of this share's losses."""
        if total not in self._weights:
            self._weights[total] = mx.nd.full((1,), 1 / total, ctx=self._device, dtype=self._update.gradients[0].dtype)
        return self._weights[total]

    def _reduce(self) -> None:
        if self._group.size > 1:
            self._group.sum_(self._update.gradients)

    def _clear(self) -> None:
        for gradient in self._update.gradients:
            gradient[:] = 0
