"""Whom the watchdog blames when ranks wait for each other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mxdist.runtime import watch
from mxdist.runtime.watch import Watchdog
from mxdist.spec import Limits, TrainingJob

JOB = TrainingJob.parse({"name": "test", "script": {"path": "train.py"}})


class Beats:
    """Ranks that all run, their beats, and the time."""

    def __init__(self, folder: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        ranks = [
            SimpleNamespace(number=n, host="h", folder=folder, log=folder / f"{n}.log", stopped=False, exit_code=None)
            for n in range(size)
        ]
        world: Any = SimpleNamespace(
            ranks=ranks, helpers=[], job=JOB, running=lambda: ranks, joined=lambda: set(range(size))
        )
        self._folder = folder
        self.dog = Watchdog(world, Limits(stall_timeout_s=10))

    def beat(self, rank: int, **told: int) -> None:
        (self._folder / f"rank-{rank}.beat.json").write_text(json.dumps({"rank": rank, **told}))
        assert self.dog.check() is None


def blamed(beats: Beats) -> int | None:
    beats.now += 100
    failure = beats.dog.check()
    assert failure is not None
    return failure.cause.rank


@pytest.mark.parametrize("culprit", [0, 1])
def test_who_is_waited_for_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: int) -> None:
    """Also where its last beat is the newer one, and where both are as far."""
    beats = Beats(tmp_path, 2, monkeypatch)
    beats.beat(1 - culprit, step=5)
    beats.beat(1 - culprit, step=5, waits_for=culprit)
    beats.now += 1
    beats.beat(culprit, step=5)
    assert blamed(beats) == culprit


def test_who_waits_himself_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Beats(tmp_path, 3, monkeypatch)
    beats.beat(0, step=5, waits_for=1)
    beats.beat(1, step=5, waits_for=2)
    beats.now += 1
    beats.beat(2, step=5)
    assert blamed(beats) == 2


def test_ranks_that_wait_for_each_other_are_blamed_by_their_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = Beats(tmp_path, 2, monkeypatch)
    beats.beat(0, step=6, waits_for=1)
    beats.now += 1
    beats.beat(1, step=5, waits_for=0)
    assert blamed(beats) == 1


def test_a_rank_that_goes_on_waits_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Beats(tmp_path, 2, monkeypatch)
    beats.beat(0, step=5, waits_for=1)
    beats.beat(1, step=6)
    beats.now += 1
    beats.beat(0, step=6)
    beats.now += 1
    beats.beat(1, step=6, waits_for=0)
    assert blamed(beats) == 0
