"""The time that is left, as it is told while a training runs."""

from __future__ import annotations

import pytest

from mxdist.runtime.status import Pace


def test_the_first_step_does_not_count() -> None:
    pace = Pace()
    for now, step in [(0.0, 0), (30.0, 1), (31.0, 11)]:  # building the graph takes 30 s, each later step 0.1 s
        pace.add(step, now=now)
    assert pace.eta_s(111) == pytest.approx(10.0)


def test_one_point_tells_nothing() -> None:
    pace = Pace()
    pace.add(0, now=0.0)
    pace.add(1, now=1.0)
    assert pace.eta_s(100) is None


def test_a_restart_begins_anew() -> None:
    pace = Pace()
    for now, step in [(0.0, 1), (1.0, 50), (20.0, 25), (21.0, 35)]:
        pace.add(step, now=now)
    assert pace.eta_s(45) == pytest.approx(1.0)
