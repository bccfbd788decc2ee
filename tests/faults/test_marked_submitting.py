"""A task is marked while it submits: its job ends, or never starts, and the record says that a person wanted it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from faults.site import RANKS, Run, Site, end_of, kill, wait_for

from mxdist import processes

BARRIERS = ["submit-claimed", "submit-started"]
MARKS = ["failed", "success"]
TOLD = "told-of-task"
EPOCHS = [f"epoch-2-rank-{rank}" for rank in range(RANKS)]  # so that no job ends by itself before it is told to


@dataclass(frozen=True)
class Marked:
    """What was marked while it submitted.

    :param lost: by barrier and mark: the worker was lost as well, and the API server is late to tell of the mark, so
        that the scheduler alone knows of it, by the end of the DAG run.
    :param alive: by barrier: the worker hears of the mark from Airflow.
    """

    lost: dict[tuple[str, str], Run]
    alive: dict[str, Run]


@pytest.fixture(scope="module")
def marked(site: Site) -> Marked:
    """Mark all of them, and wait until the submission is over."""
    lost = {
        (barrier, mark): site.train(f"lost-and-{mark}-{barrier}", hold=[barrier, TOLD, *EPOCHS])
        for barrier in BARRIERS
        for mark in MARKS
    }
    for (barrier, mark), run in lost.items():
        task = run.reached(barrier)
        process = processes.read(task)
        assert process is not None
        kill(process.parent, task)
        run.mark(mark)
    for run in lost.values():
        wait_for(lambda run=run: run.attempt().cancel_intent(), f"the scheduler to end the job of {run.run_id}")
    for (barrier, _), run in lost.items():
        if barrier == "submit-started":
            end_of(run.attempt())  # while its ranks are held: released, they might be through before they are told
        run.release()
    alive = {
        barrier: site.train(f"marked-{barrier}", hold=[barrier, *EPOCHS])
        for barrier in ["submit-before-claim", *BARRIERS]
    }
    for barrier, run in alive.items():
        task = run.reached(barrier)
        run.mark("failed")
        wait_for(lambda task=task: processes.read(task) is None, f"Airflow to end the task of {run.run_id}")
        if barrier == "submit-started":
            end_of(run.attempt())
        run.release()
    return Marked(lost, alive)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("barrier", BARRIERS)
def test_scheduler_says_that_a_person_wanted_it(marked: Marked, barrier: str, mark: str) -> None:
    run = marked.lost[barrier, mark]
    assert run.task()["state"] == mark
    intent = run.attempt().cancel_intent()
    assert intent is not None
    assert (intent.by, intent.marked_success) == ("user", mark == "success")
    assert f"marked as {mark}" in intent.reason
    if barrier == "submit-claimed":  # nobody is there who could carry it out
        run.site.reconcile()
    assert run.result().state.value == "CANCELLED"
    run.gone()


@pytest.mark.parametrize("barrier", BARRIERS)
def test_task_ends_what_it_submitted(marked: Marked, barrier: str) -> None:
    run = marked.alive[barrier]
    assert run.task()["state"] == "failed"
    assert run.result().state.value == "CANCELLED"
    intent = run.attempt().cancel_intent()
    assert intent is not None
    assert intent.by == "user"
    run.gone()


def test_task_that_claimed_nothing_leaves_nothing(marked: Marked) -> None:
    run = marked.alive["submit-before-claim"]
    assert run.task()["state"] == "failed"
    assert run.attempts() == []
