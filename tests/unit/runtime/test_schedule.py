"""The learning rate, step by step, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mxdist.runtime.schedule import rate
from mxdist.spec import Optimizer


def rates(steps: int, **schedule: Any) -> list[float]:
    """Return the rate of every step, as a share of the full one."""
    spec = Optimizer.parse({"learning_rate": 1.0, "schedule": schedule})
    return [rate(spec, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"decay": "step", "step_size": 2, "factor": 0.1}, [1, 1, 0.1, 0.1, 0.01, 0.01]),
        ({"decay": "step", "step_size": 2, "factor": 0.5, "warmup_steps": 2}, [0.5, 1, 1, 1, 0.5, 0.5]),
        ({"decay": "cosine", "warmup_steps": 1}, [1, 1, 0.8535533905932737, 0.5, 0.14644660940672627, 0]),
        ({"decay": "cosine", "final_fraction": 0.2, "warmup_steps": 3}, [1 / 3, 2 / 3, 1, 1, 0.6, 0.2]),
        ({"warmup_steps": 4, "warmup_from": 0.5}, [0.625, 0.75, 0.875, 1, 1, 1]),
    ],
    ids=["constant", "warmup", "step", "step-warmup", "cosine", "cosine-final", "warmup-from-a-rate"],
)
def test_rates(schedule: dict[str, Any], expected: list[float]) -> None:
    assert rates(6, **schedule) == pytest.approx(expected, abs=1e-15)


def test_one_step_has_a_rate() -> None:
    assert rates(1, decay="cosine") == [1.0]
