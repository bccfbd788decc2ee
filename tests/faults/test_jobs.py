"""The processes of a job are killed: either rank, the supervisor while it trains, the supervisor before its result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faults.site import RANKS, Run, Site, Trained, assert_trained_once, kill

EPOCH = 2
BEFORE_RESULT = "supervisor-before-result"


def _epoch_ends() -> list[str]:
    return [f"epoch-{EPOCH}-rank-{rank}" for rank in range(RANKS)]


def _rank(number: int) -> Callable[[Run], int]:
    return lambda run: run.reached(f"epoch-{EPOCH}-rank-{number}")


def _supervisor(run: Run) -> int:
    for barrier in _epoch_ends():
        run.reached(barrier)
    return run.supervisor()


def _publisher(run: Run) -> int:
    return run.reached(BEFORE_RESULT)


VICTIMS: dict[str, tuple[list[str], Callable[[Run], int]]] = {
    "rank-0": (_epoch_ends(), _rank(0)),
    "rank-1": (_epoch_ends(), _rank(1)),
    "supervisor": (_epoch_ends(), _supervisor),
    "supervisor-before-result": ([BEFORE_RESULT], _publisher),
}


@pytest.fixture(scope="module")
def runs(site: Site) -> dict[str, Run]:
    """One run for each victim, which was killed while the task was deferred."""
    runs = {name: site.train(f"{name}-killed", hold=barriers) for name, (barriers, _) in VICTIMS.items()}
    for name, run in runs.items():
        victim = VICTIMS[name][1](run)
        run.in_state("deferred")
        kill(victim)
        run.release()
    return runs


@pytest.mark.parametrize("victim", ["rank-0", "rank-1"])
def test_the_world_starts_again(runs: dict[str, Run], undisturbed: Trained, victim: str) -> None:
    run = runs[victim]
    assert_trained_once(run, undisturbed)
    assert run.task()["try_number"] == 1
    assert run.result().restarts == 1
    assert run.attempt().supervisors.last() == 1


def test_the_next_supervisor_goes_on(runs: dict[str, Run], undisturbed: Trained) -> None:
    run = runs["supervisor"]
    assert_trained_once(run, undisturbed)
    assert run.task()["try_number"] == 1
    assert run.result().restarts == 1, "the ranks of a dead supervisor die with it"
    assert run.attempt().supervisors.last() == 2


def test_the_next_supervisor_publishes_what_was_trained(runs: dict[str, Run], undisturbed: Trained) -> None:
    run = runs["supervisor-before-result"]
    assert_trained_once(run, undisturbed)
    assert run.task()["try_number"] == 1
    assert run.result().restarts == 0, "nothing is trained twice"
    assert run.attempt().supervisors.last() == 2
