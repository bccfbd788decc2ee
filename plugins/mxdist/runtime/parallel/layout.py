"""How a rank computes its part of the mean gradient of a global batch.

Each row's loss weighs ``1 / rows of the global batch``, on whichever rank, device or stage the row is; the gradients of
all ranks are summed; so every rank holds the mean gradient of the global batch, and what follows (clipping, the update)
is the same on all. A rank without rows has a gradient of zero and takes part like the others.

``Step`` calls, in this order and on every rank: ``backward``, ``reduce``, ``update``. ``gather`` comes before anything
that looks at the whole model: the comparison of ranks, validation, a checkpoint, the export.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd

from mxdist.runtime import network
from mxdist.runtime.batches import Batch
from mxdist.runtime.parallel.base import Group
from mxdist.runtime.parallel.half import HalfSum
from mxdist.runtime.parallel.shared import SharedSum
from mxdist.runtime.update import Update, square_sums


class Layout(ABC):
    """What one rank does with its share of each batch.

    :param updater: the weights, gradients and optimizer that this rank updates.
    :param group: all ranks.
    :ivar half: sums gradients as float16, when the job asks for it.
    """

    def __init__(self, updater: Update, group: Group) -> None:
        self.updater = updater
        self.group = group
        self.half: HalfSum | None = None
        self._squares: mx.nd.NDArray | None = None
        self._weights: dict[tuple[int, mx.Context], mx.nd.NDArray] = {}

    @property
    def data_rank(self) -> int:
        """Which share of each global batch this rank reads."""
        return self.group.rank

    @property
    def data_size(self) -> int:
        """How many shares a global batch has."""
        return self.group.size

    @property
    def names(self) -> list[str]:
        """All trained parameters, in the order in which ``squares`` has them; the same on every rank."""
        return self.updater.names

    @abstractmethod
    def backward(self, batch: Batch) -> mx.nd.NDArray | None:
        """Leave in ``updater.gradients`` this rank's part of the gradient of the global batch's mean loss.

        :return: the sum of the loss over this rank's rows, shape (1,), not waited for; None without rows.
        """

    def reduce(self) -> None:
        """Sum the gradients over all ranks; returns at once."""
        if self.group.size == 1:
            return
        if self.half is None:
            self._sum(self.updater.gradients)
            return
        self.half.sum_(self.updater.gradients, self._sum)
        if self._squares is not None:  # what became infinite on its way shows as not finite at this step
            self._squares += self._square() * 0
            self._squares = None

    def _sum(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Replace each array by its sum over the ranks that train it."""
        self.group.sum_(arrays)

    def update(self, number: int) -> float:
        """Make optimizer step ``number`` (from 1); return its learning rate."""
        return self.updater.apply(number)

    def gather(self, *, state: bool = True) -> None:
        """Make this rank hold every weight, if other ranks or devices hold some; every rank must call it.

        :param state: all of the optimizer's state, too.
        """
        return

    def close(self) -> None:
        """End what runs beside the loop; nothing is called afterwards."""
        return

    def squares(self) -> mx.nd.NDArray:
        """Return the sum of squares of this rank's part of the gradient, per parameter."""
        self._squares = self._square()
        return self._squares

    def _square(self) -> mx.nd.NDArray:
        return square_sums(self.updater.gradients)

    @property
    def hint(self) -> str:
        """What may help when a loss or a gradient is not finite."""
        ways = "Look at the data of that step, or use a lower learning rate, warm-up steps or clip_norm."
        return ways if self.half is None else f"{HalfSum.HINT} {ways}"

    def figures(self) -> dict[str, float]:
        """Return what this layout measured of itself since the last call, over all ranks; every rank must ask."""
        return {}

    def weight(self, total: int, device: mx.Context) -> mx.nd.NDArray:
        """Return the derivative of the mean loss of ``total`` rows with respect to the sum of some of their losses."""
        key = (total, device)
        if key not in self._weights:
            self._weights[key] = mx.nd.full((1,), 1 / total, ctx=device, dtype=self.dtype)
        return self._weights[key]

    @property
    def dtype(self) -> Any:
        """What the loss and its gradient are computed in."""
        return self.updater.gradients[0].dtype


class Whole(Layout):
    """The whole network on one device.

    :param graph: the sum of the loss over a share, hybridized.
    :param parts: how many parts a share is computed in, one after the other; their gradients are added.
    :param shared: where the gradients of all ranks are summed, if not by Horovod.
    """

    def __init__(
        self,
        graph: network.LossSum,
        updater: Update,
        group: Group,
        device: mx.Context,
        parts: int = 1,
        shared: SharedSum | None = None,
    ) -> None:
        super().__init__(updater, group)
        self._shared = shared
        self._graph = graph
        self._device = device
        self._parts = parts
        if parts > 1:
            autograd.mark_variables(updater.weights, updater.gradients, "add")

    def backward(self, batch: Batch) -> mx.nd.NDArray | None:
        """Compute the gradient of this rank's rows in one piece, or part by part."""
        if not batch.rows:
            self._graph.join(self._device)
        if not batch.rows or self._parts > 1:
            for gradient in self.updater.gradients:
                gradient[:] = 0
        losses = [self._part(batch, rows) for rows in divide(batch.rows, self._parts)]
        return mx.nd.add_n(*losses) if len(losses) > 1 else next(iter(losses), None)

    def reduce(self) -> None:
        """Sum the gradients over all ranks, in shared memory or by Horovod."""
        if self._shared is None:
            super().reduce()
        else:
            self._shared.sum_()

    def close(self) -> None:
        """Leave the memory that gradients are summed in."""
        if self._shared is not None:
            self._shared.close()

    def gather(self, *, state: bool = True) -> None:
        """Make running statistics equal again, where ranks took their own."""
        self._graph.agree(self.group)

    def _part(self, batch: Batch, rows: slice) -> mx.nd.NDArray:
        x, y = take(batch, rows)
        with autograd.record():
            loss: mx.nd.NDArray = self._graph(x, y)
        loss.backward(self.weight(batch.total, self._device))
        return loss


def divide(rows: int, parts: int) -> list[slice]:
    """Return how ``rows`` are divided: at most ``parts`` slices, none of them empty, the first ones a row longer."""
    each, more = divmod(rows, parts)
    ends = [each * (part + 1) + min(part + 1, more) for part in range(min(parts, rows))]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def take(batch: Batch, rows: slice) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Return inputs and targets of some rows of a share that has any."""
    if batch.x is None or batch.y is None:
        raise ValueError("a share without rows has no part")
    return (batch.x, batch.y) if rows == slice(0, batch.rows) else (batch.x[rows], batch.y[rows])
