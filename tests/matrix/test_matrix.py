"""Trials of the kill matrix: each disturbs one training, and looks at everything that it left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matrix.cells import EVERY, SENSIBLE, draw
from matrix.scene import Scene
from matrix.verdict import judge


def test_seeds_in_a_row_try_every_cell_once() -> None:
    trials = [draw(seed) for seed in range(len(SENSIBLE))]
    assert {trial.cell for trial in trials} == set(SENSIBLE)
    assert draw(7) == draw(7)
    assert all(cell.senseless for cell in EVERY if cell not in SENSIBLE)


@pytest.mark.timeout(900)
def test_trial(scene: Scene, seed: int, request: pytest.FixtureRequest) -> None:
    trial = draw(seed)
    scene.ready()
    verdict = judge(trial, scene.hit(trial), scene.undisturbed)
    report: Path = request.config.getoption("report")
    report.parent.mkdir(parents=True, exist_ok=True)
    with report.open("a") as lines:
        lines.write(json.dumps(verdict.document()) + "\n")
    assert not verdict.violations, f"{trial}: {verdict.violations}"
