"""The Airflow worker is killed while it submits: before the claim, between claim and start, after the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.site import Run, Site, Trained, assert_trained_once, kill

from mxdist import processes

BARRIERS = ["submit-before-claim", "submit-claimed", "submit-started"]


@pytest.fixture(scope="module")
def runs(site: Site) -> dict[str, Run]:
    """One run for each barrier, whose worker was killed there."""
    runs = {barrier: site.train(f"worker-killed-{barrier}", hold=[barrier]) for barrier in BARRIERS}
    for barrier, run in runs.items():
        task = run.reached(barrier)
        process = processes.read(task)
        assert process is not None
        worker = process.parent
        assert "airflow worker" in Path(f"/proc/{worker}/cmdline").read_text()
        kill(worker, task)
        run.release()
    return runs


@pytest.mark.parametrize("barrier", BARRIERS)
def test_the_next_try_finds_the_job(runs: dict[str, Run], undisturbed: Trained, barrier: str) -> None:
    assert_trained_once(runs[barrier], undisturbed)
    assert runs[barrier].task()["try_number"] == 2
    assert runs[barrier].attempt().supervisors.last() == 1
