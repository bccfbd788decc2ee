"""Checkpoints in the background: patient with the store, strict about fences."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mxdist.errors import CheckpointError, Fenced, StoreError
from mxdist.runtime import saver
from mxdist.runtime.saver import Saver

BOUND_S = 60.0


class Recorder:
    """Stands where checkpoints go; ``errors`` are raised one after the other."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.steps: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def save(self, arrays: Mapping[str, Any], values: Mapping[str, Any], *, step: int) -> bool:
        """Save, or fail."""
        self.entered.set()
        assert self.gate.wait(BOUND_S)
        if self.errors:
            raise self.errors.pop(0)
        self.steps.append(step)
        return True


def started(recorder: Recorder) -> Saver:
    """Return a saver that writes to ``recorder``."""
    return Saver(recorder)  # type: ignore[arg-type]


def test_everything_is_published_once_drained() -> None:
    recorder = Recorder()
    ours = started(recorder)
    ours.save({"w": np.zeros(1)}, {}, step=3)
    assert ours.drain(BOUND_S)
    assert (recorder.steps, ours.published) == ([3], 3)
    ours.close()


def test_training_does_not_wait_and_only_the_newest_that_waits_counts() -> None:
    recorder = Recorder()
    recorder.gate.clear()
    ours = started(recorder)
    ours.save({}, {}, step=1)
    assert recorder.entered.wait(BOUND_S)
    ours.save({}, {}, step=2)
    ours.save({}, {}, step=3)
    assert not ours.drain(0.05)
    recorder.gate.set()
    assert ours.drain(BOUND_S)
    assert recorder.steps == [1, 3]
    ours.close()


def test_a_store_that_is_away_for_a_while_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "_FIRST_WAIT_S", 0.01)
    recorder = Recorder(StoreError("away"), StoreError("still away"))
    ours = started(recorder)
    ours.save({}, {}, step=5)
    assert ours.drain(BOUND_S)
    assert recorder.steps == [5]
    ours.close()


@pytest.mark.parametrize(
    "error", [Fenced("replaced"), CheckpointError("objects"), StoreError("denied", retryable=False)]
)
def test_what_cannot_be_mended_is_raised_in_the_training(error: Exception) -> None:
    ours = started(Recorder(error))
    ours.save({}, {}, step=1)
    with pytest.raises(type(error)):
        ours.drain(BOUND_S)
    with pytest.raises(type(error)):
        ours.save({}, {}, step=2)


def test_a_fault_of_ours_is_not_swallowed() -> None:
    ours = started(Recorder(ZeroDivisionError("x")))
    ours.save({}, {}, step=1)
    with pytest.raises(Exception, match="the checkpoint of step 1 failed: x"):
        ours.drain(BOUND_S)
