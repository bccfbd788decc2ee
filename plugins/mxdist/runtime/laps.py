"""What a rank's steps spend their time on, and which rank holds up the others.

At one step of each stretch (see ``exchange.py``) every rank waits for its device twice: when its part of the gradient
is computed, and when all ranks' parts are summed. Little else is left to do then, for a stretch has just ended.
What a rank waits for the sum, others spent computing or waiting for their data; so the slowest is the one that computes
and loads longest, not the one that waits longest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import mxnet as mx
import numpy as np

from mxdist.runtime.parallel.base import Float64

log = logging.getLogger(__name__)

T = TypeVar("T")

KINDS = ("data_wait_s", "compute_s", "allreduce_wait_s")
_NAMED = 16  # ranks whose times are all recorded
_FACTOR = 1.5
_LEAST_S = 0.005
_LOOKS = 5


class Laps:
    """One rank's watch.

    :param active: whether ranks wait for each other at the sum and nowhere else, as they do with stages on several
        ranks or with synchronised BatchNorm; else nothing is measured.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._timed = active
        self._data = self._compute = self._wait = 0.0
        self._steps = 0
        self._since = 0.0

    def waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, with a look at the watch before and after each."""
        if not self._active:
            yield from batches
            return
        while True:
            began = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._since = time.monotonic()
            self._data += self._since - began
            self._steps += 1
            yield batch

    def computed(self) -> None:
        """Note that this rank's part of the gradient was asked for."""
        if self._timed:
            self._compute = self._lap()

    def summed(self) -> None:
        """Note that the sum was asked for; the next step that is timed is the first of the next stretch."""
        if self._timed:
            self._wait = self._lap()
            self._timed = False

    def take(self) -> tuple[float, float, float]:
        """Return the times of a step since the last call, in the order of ``KINDS``, and begin anew."""
        taken = self._data / max(self._steps, 1), self._compute, self._wait
        self._data, self._steps, self._timed = 0.0, 0, self._active
        return taken

    def _lap(self) -> float:
        mx.nd.waitall()
        now = time.monotonic()
        lap, self._since = now - self._since, now
        return lap


@dataclass(frozen=True)
class _Slow:
    """A rank that holds up the others.

    :param factor: how many times their median it takes.
    """

    rank: int
    factor: float
    others_s: float


class Stragglers:
    """What rank 0 knows of all ranks' times.

    :param host_of: the name of a rank's host; asked only when a rank is named.
    """

    def __init__(self, host_of: Callable[[int], str]) -> None:
        self._host_of = host_of
        self._sum: Float64 | float = 0.0
        self._looks = 0
        self._suspect: tuple[int, int] | None = None
        self._named: int | None = None

    def look(self, times: Float64) -> None:
        """Look at one step's times, shape (ranks, ``KINDS``), and name a rank that was the slowest for some while."""
        self._sum, self._looks = self._sum + times, self._looks + 1
        slow = _slowest(times)
        if slow is None:
            self._suspect = None
            return
        again = self._suspect[1] + 1 if self._suspect and self._suspect[0] == slow.rank else 1
        self._suspect = (slow.rank, again)
        if again >= _LOOKS and self._named != slow.rank:
            self._named = slow.rank
            data, compute, _ = times[slow.rank]
            log.warning(
                "rank %d on %s holds up the others: a step takes it %.1f times as long as them (%.3f s computing and "
                "%.3f s waiting for data; they take %.3f s)",
                slow.rank, self._host_of(slow.rank), slow.factor, compute, data, slow.others_s,
            )  # fmt: skip

    def figures(self) -> dict[str, float]:
        """Return the mean times of an epoch's steps, and the slowest rank; begin anew."""
        if not self._looks:
            return {}
        times = np.asarray(self._sum) / self._looks
        self._sum, self._looks = 0.0, 0
        found = dict(zip(KINDS, times.mean(axis=0).tolist(), strict=True))
        own = _own(times)
        found |= {"slowest_rank": float(own.argmax()), "slowest_rank_step_s": float(own.max())}
        if len(times) <= _NAMED:
            for rank, row in enumerate(times.tolist()):
                found |= {f"rank_{rank}_{kind}": value for kind, value in zip(KINDS, row, strict=True)}
        return found


def _own(times: Float64) -> Float64:
    """Return what each rank's step takes without waiting for others."""
    own: Float64 = times[:, 0] + times[:, 1]
    return own


def _slowest(times: Float64) -> _Slow | None:
    """Return the rank that takes longer than the median of all others by a half, and by more than a clock's tremble."""
    own = _own(times)
    rank = int(own.argmax())
    others = float(np.median(np.delete(own, rank)))
    if own[rank] < _FACTOR * others or own[rank] - others < _LEAST_S:
        return None
    return _Slow(rank, float(own[rank] / max(others, 1e-9)), others)
