"""One optimizer step on the global batch, however many ranks share it; what they do is their layout's affair."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import mxnet as mx

from mxdist.errors import Problem, SpecError
from mxdist.runtime import network
from mxdist.runtime.batches import Batch
from mxdist.runtime.laps import Laps
from mxdist.runtime.parallel.layout import Layout


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
    """Makes optimizer steps; waits for the device only where one is timed.

    :param layout: how this rank computes its part of the gradient, and meets the others.
    :param laps: this rank's watch.
    """

    def __init__(self, layout: Layout, laps: Laps) -> None:
        self._layout, self._laps = layout, laps
        self._checked = False

    def make(self, batch: Batch, number: int) -> Trace:
        """Make optimizer step ``number`` (from 1) on this rank's share of the batch."""
        loss = self._first_backward(batch) if batch.rows and not self._checked else self._layout.backward(batch)
        squares = None if loss is None else self._layout.squares()
        self._laps.computed()
        self._layout.reduce()
        self._laps.summed()
        learning_rate = self._layout.update(number)
        return Trace(loss, squares, batch.rows, batch.total, learning_rate)

    def _first_backward(self, batch: Batch) -> mx.nd.NDArray | None:
        """Refuse parameters that the loss does not depend on: their gradient would stay whatever it was."""
        self._checked = True
        updater = self._layout.updater
        for weight in updater.weights:
            weight._fresh_grad = False
        with warnings.catch_warnings():  # Gluon says it too, but not by the names that a user knows
            warnings.filterwarnings("ignore", message="Parameter .* is not used by any computation")
            loss = self._layout.backward(batch)
        names = network.stale(updater.names, updater.weights)
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            problem = f"the loss does not depend on {shown}; freeze them (init.freeze), or take them out of the network"
            raise SpecError("The job", [Problem("model", problem)])
        return loss
