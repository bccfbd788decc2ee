"""What is told between ranks, here by a group of one that answers like two."""

from __future__ import annotations

import math

import mxnet as mx
import numpy as np
import pytest

from mxdist.errors import NonFiniteError
from mxdist.runtime.exchange import Exchange
from mxdist.runtime.laps import Laps
from mxdist.runtime.parallel import Alone
from mxdist.runtime.parallel.base import Float64
from mxdist.runtime.step import Trace

NO_LAPS = Laps(active=False)


class WithPeer(Alone):
    """Rank 0 of two; the other one says ``peer``."""

    size = 2
    peer: Float64 | None = None

    def total(self, values: Float64) -> Float64:
        """Add what the other rank says."""
        return values + (np.zeros_like(values) if self.peer is None else self.peer)


def trace(loss: float | None, *squares: float, total: int = 4, rate: float = 0.1) -> Trace:
    """Return the trace of a step."""
    if loss is None:
        return Trace(None, None, 0, total, rate)
    return Trace(mx.nd.array([loss]), mx.nd.array(list(squares)), 2, total, rate)


def test_losses_are_means_over_the_global_batch() -> None:
    group = WithPeer()
    exchange = Exchange(group, ["a"], NO_LAPS)
    exchange.add(1, trace(6.0, 1.0, total=8))
    exchange.add(2, trace(None, total=1, rate=0.2))
    group.peer = np.array([2.0, 5.0, *[0.0] * 14])
    report = exchange.meet(stop=False)
    assert report.losses == {1: 1.0, 2: 5.0}
    assert (report.loss_sum, report.examples, report.learning_rate, report.stop) == (13.0, 9, 0.2, False)
    group.peer = None
    assert exchange.meet(stop=False).losses == {}


@pytest.mark.parametrize("mine", [True, False])
def test_one_rank_that_is_asked_to_stop_stops_all(mine: bool) -> None:
    group = WithPeer()
    exchange = Exchange(group, ["a"], NO_LAPS)
    exchange.add(1, trace(1.0, 1.0))
    group.peer = np.array([0.0, *[0.0] * 7, 0, 0, float(not mine), *[0.0] * 4])
    assert exchange.meet(stop=mine).stop


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(value: float) -> None:
    exchange = Exchange(Alone(), ["a"], NO_LAPS)
    exchange.add(1, trace(1.0, 1.0))
    exchange.add(2, trace(value, 1.0))
    with pytest.raises(NonFiniteError, match="the loss is not finite at step 2 on rank 0"):
        exchange.meet(stop=False)


def test_the_first_layer_of_the_first_step_is_named() -> None:
    exchange = Exchange(Alone(), ["first", "second", "third"], NO_LAPS)
    exchange.add(4, trace(1.0, 1.0, 1.0, 1.0))
    exchange.add(5, trace(1.0, 1.0, math.inf, math.nan))
    exchange.add(6, trace(math.nan, math.nan, math.nan, math.nan))
    with pytest.raises(NonFiniteError, match="the gradient of second is not finite at step 5 on rank 0") as raised:
        exchange.meet(stop=False)
    assert raised.value.rank == 0


def test_the_rank_that_was_first_is_named_by_all() -> None:
    group = WithPeer()
    exchange = Exchange(group, ["first", "second"], NO_LAPS)
    exchange.add(7, trace(1.0, 1.0, 1.0))
    exchange.add(8, trace(math.nan, math.nan, math.nan))
    group.peer = np.array([0.0, 0.0, *[0.0] * 7, 7, 2, *[0.0] * 5])
    with pytest.raises(NonFiniteError, match="the gradient of second is not finite at step 7 on rank 1"):
        exchange.meet(stop=False)


def test_stretches_grow_to_their_time_and_end_at_the_same_step() -> None:
    exchange = Exchange(Alone(), ["a"], NO_LAPS)
    step, lengths = 0, []
    for _ in range(6):
        length = 0
        while not exchange.due:
            step, length = step + 1, length + 1
            exchange.add(step, trace(1.0, 1.0))
        exchange.meet(stop=False)
        lengths.append(length)
    assert lengths[0] == 1
    assert all(later <= 4 * earlier for earlier, later in zip(lengths, lengths[1:], strict=False))
    assert max(lengths) <= 500
