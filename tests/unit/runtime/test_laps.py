"""From every rank's times to the one that holds up the others."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from mxdist.runtime.laps import Stragglers

EVEN = np.array([[0.0, 0.10, 0.01], [0.0, 0.11, 0.0], [0.0, 0.10, 0.01]])
SLOW = np.array([[0.0, 0.10, 0.2], [0.1, 0.20, 0.0], [0.0, 0.10, 0.2]])


def _named(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "holds up" in record.getMessage()]


def _stragglers() -> Stragglers:
    return Stragglers(lambda rank: f"node-{rank}")


def test_even_ranks_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    stragglers = _stragglers()
    for _ in range(20):
        stragglers.look(EVEN)
    assert _named(caplog) == []


def test_slow_rank_is_named_once_with_its_host_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stragglers = _stragglers()
    for _ in range(20):
        stragglers.look(SLOW)
    (said,) = _named(caplog)
    assert said.startswith("rank 1 on node-1 holds up the others: a step takes it 3.0 times as long as them")
    assert "0.200 s computing and 0.100 s waiting for data; they take 0.100 s" in said


def test_rank_that_is_slow_now_and_then_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    stragglers = _stragglers()
    for look in range(40):
        stragglers.look(EVEN if look % 4 == 0 else SLOW)
    assert _named(caplog) == []


def test_tiny_steps_differ_without_meaning(caplog: pytest.LogCaptureFixture) -> None:
    stragglers = _stragglers()
    for _ in range(20):
        stragglers.look(SLOW / 100)
    assert _named(caplog) == []


def test_figures_of_an_epoch_are_means() -> None:
    stragglers = _stragglers()
    for times in (EVEN, SLOW):
        stragglers.look(times)
    figures = stragglers.figures()
    assert figures["rank_1_data_wait_s"] == pytest.approx(0.05)
    assert figures["compute_s"] == pytest.approx((0.31 + 0.40) / 6)
    assert (figures["slowest_rank"], figures["slowest_rank_step_s"]) == (1.0, pytest.approx(0.205))
    assert stragglers.figures() == {}


def test_of_many_ranks_only_the_slowest_is_recorded() -> None:
    stragglers = _stragglers()
    stragglers.look(np.tile(EVEN[0], (64, 1)))
    assert sorted(stragglers.figures()) == [
        "allreduce_wait_s", "compute_s", "data_wait_s", "slowest_rank", "slowest_rank_step_s"
    ]  # fmt: skip
