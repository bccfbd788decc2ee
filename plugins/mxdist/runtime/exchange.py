"""What ranks tell each other now and then instead of waiting for each other at every step.

Losses stay on the device. Every ``k`` steps, one small float64 vector is summed over all ranks: the losses of these
steps, whether and where something was not finite, whether somebody was asked to stop, how long the next stretch is, and
what a step of each rank spends its time on.
Rank 0 chooses ``k`` so that a stretch takes about 0.7 s.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import mxnet as mx
import numpy as np

from mxdist.errors import NonFiniteError
from mxdist.runtime.laps import KINDS, Laps
from mxdist.runtime.parallel.base import Float64, Group
from mxdist.runtime.step import Trace

STRETCH_S = 0.7
_LONGEST = 500
_AHEAD = 8  # steps that Python may be ahead of the device
_SLOTS = 4 + len(KINDS)  # numbers that each rank tells about itself


@dataclass(frozen=True)
class Report:
    """What all ranks know after an exchange.

    :param losses: mean loss of each global batch, by step.
    :param loss_sum: sum of the losses of all examples.
    :param examples: how many these were.
    :param stop: somebody was asked to stop.
    :param seconds: since the exchange before.
    :param times: of a step of each rank, shape (ranks, ``KINDS``), in seconds.
    """

    losses: dict[int, float]
    loss_sum: float
    examples: int
    learning_rate: float
    stop: bool
    seconds: float
    times: Float64


class Exchange:
    """Gathers traces of steps, and exchanges them when it is time.

    :param names: of the trained parameters, in the order of the layers.
    :param laps: this rank's watch.
    :param hint: what may help when something is not finite.
    """

    def __init__(self, group: Group, names: list[str], laps: Laps, hint: str = "") -> None:
        self._group = group
        self._laps = laps
        self._hint = hint
        self._names = names
        self._stretch = 1
        self._traces: list[tuple[int, Trace]] = []
        self._since = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether this step ends the stretch; the same answer on every rank."""
        return len(self._traces) >= self._stretch

    @property
    def pending(self) -> bool:
        """Whether there are steps that were not exchanged."""
        return bool(self._traces)

    def restart_clock(self) -> None:
        """Leave out the time since the last exchange: it was not spent on steps."""
        self._since = time.monotonic()

    def add(self, step: int, trace: Trace) -> None:
        """Keep a step's trace; waits for the device when it is many steps behind."""
        self._traces.append((step, trace))
        if len(self._traces) > _AHEAD:
            old = self._traces[-_AHEAD - 1][1].loss
            if old is not None:
                old.wait_to_read()

    def meet(self, *, stop: bool) -> Report:
        """Exchange with all other ranks.

        :param stop: this rank was asked to stop.
        :raises NonFiniteError: on every rank, if a loss or a gradient of any rank was NaN or infinite.
        """
        losses = self._losses()
        step, layer = self._first_bad(losses)
        seconds = time.monotonic() - self._since
        table = np.zeros((self._group.size, _SLOTS))
        next_ = self._next(seconds) if self._group.rank == 0 else 0
        table[self._group.rank] = (step, layer, float(stop), next_, *self._laps.take())
        # A sum over ranks must not spread one rank's NaN over what the others tell.
        sent = np.concatenate([np.where(np.isfinite(losses), losses, 0.0), table.ravel()])
        received = self._group.total(sent)
        sums, table = received[: len(losses)], received[len(losses) :].reshape(table.shape)
        self._raise_bad(table)
        self._stretch = int(table[0, 3])
        self._since = time.monotonic()
        return self._report(sums, bool(table[:, 2].any()), seconds, table[:, 4:])

    def _report(self, sums: Float64, stop: bool, seconds: float, times: Float64) -> Report:
        means = {step: float(value) / trace.total for (step, trace), value in zip(self._traces, sums, strict=True)}
        examples = sum(trace.total for _, trace in self._traces)
        learning_rate = self._traces[-1][1].learning_rate if self._traces else 0.0
        self._traces = []
        return Report(means, float(sums.sum()), examples, learning_rate, stop, seconds, times)

    def _next(self, seconds: float) -> int:
        """Return how many steps the next stretch has; it grows at most fourfold, since first steps are slow."""
        if not self._traces:
            return self._stretch
        each = max(seconds, 1e-6) / len(self._traces)
        return int(min(max(STRETCH_S / each, 1), 4 * self._stretch, _LONGEST))

    def _losses(self) -> Float64:
        """Return the sum of the loss of this rank's rows at each step."""
        computed = [trace.loss for _, trace in self._traces if trace.loss is not None]
        values = iter(mx.nd.concat(*computed, dim=0).asnumpy().astype(np.float64) if computed else ())
        return np.array([0.0 if trace.loss is None else next(values) for _, trace in self._traces], dtype=np.float64)

    def _first_bad(self, losses: Float64) -> tuple[int, int]:
        """Return this rank's first step with something not finite, and which parameter (from 1); zeros if none."""
        squares = [trace.squares for _, trace in self._traces if trace.squares is not None]
        table = mx.nd.stack(*squares).asnumpy() if squares else np.zeros((0, len(self._names)))
        lines = iter(np.isfinite(table))
        for (step, trace), loss in zip(self._traces, losses, strict=True):
            finite = next(lines) if trace.squares is not None else np.ones(len(self._names), dtype=bool)
            if not (math.isfinite(loss) and finite.all()):
                return step, 0 if finite.all() else int(np.argmin(finite)) + 1
        return 0, 0

    def _raise_bad(self, table: Float64) -> None:
        bad = sorted((int(row[0]), rank, int(row[1])) for rank, row in enumerate(table) if row[0])
        if not bad:
            return
        step, rank, layer = bad[0]
        what = f"the gradient of {self._names[layer - 1]}" if layer else "the loss"
        raise NonFiniteError(
            f"{what} is not finite at step {step} on rank {rank}.",
            rank=rank,
            hint=self._hint,
        )
