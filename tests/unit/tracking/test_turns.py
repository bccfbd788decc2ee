"""One DAG run at a time trains for a model; those that wait go in the order of their data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mxdist.store import Store, open_store
from mxdist.tracking.turns import Asked, Party, Turns

MODEL = "digits/5 to 9"


class Airflow:
    """What is over and who waits no more, by run id."""

    def __init__(self) -> None:
        self.over: set[str] = set()
        self.gone: set[str] = set()

    @property
    def asked(self) -> Asked:
        return Asked(lambda one: one.run_id in self.over, lambda one: one.run_id in self.over | self.gone)


def party(run_id: str, day: int = 1, *, task_id: str = "train", dag_id: str = "a_dag") -> Party:
    return Party("here", dag_id, run_id, task_id, -1, f"2026-03-{day:02d}T00:00:00+00:00", f"{task_id}-{run_id}")


@pytest.fixture
def runs(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "runs"))


@pytest.fixture
def airflow() -> Airflow:
    return Airflow()


@pytest.fixture
def take(runs: Store, airflow: Airflow) -> Callable[..., str | None]:
    """Each call is another process; it returns the run that must be waited for."""

    def call(one: Party, *, wait: bool = True, model: str = MODEL) -> str | None:
        blocker = Turns(runs, model).take(one, airflow.asked, wait=wait)
        return blocker.run_id if blocker else None

    return call


def test_second_run_waits_until_the_first_is_over(take: Callable[..., str | None], airflow: Airflow) -> None:
    assert take(party("first")) is None
    assert take(party("second", 2)) == "first"
    assert take(party("second", 2)) == "first"
    airflow.over = {"first"}
    assert take(party("second", 2)) is None


def test_all_trainings_of_a_run_share_its_turn(take: Callable[..., str | None], runs: Store) -> None:
    assert take(party("first")) is None
    assert take(party("first", task_id="tune")) is None
    holder = Turns(runs, MODEL).holder()
    assert holder is not None
    assert holder.job_key == "tune-first"


def test_taking_it_again_writes_nothing(take: Callable[..., str | None], runs: Store) -> None:
    take(party("first"))
    take(party("second", 2))
    before = {entry.key for entry in runs.list()}
    assert (take(party("first")), take(party("second", 2))) == (None, "first")
    assert {entry.key for entry in runs.list()} == before


def test_other_models_are_trained_at_once(take: Callable[..., str | None]) -> None:
    assert take(party("first")) is None
    assert take(party("second"), model="letters") is None


def test_oldest_data_go_first_among_those_that_wait(take: Callable[..., str | None], airflow: Airflow) -> None:
    take(party("third", 3))
    for name, day in (("fifth", 5), ("first", 1), ("fourth", 4), ("second", 2)):
        assert take(party(name, day)) == "third"
    order = []
    waiting = {"fifth": 5, "first": 1, "fourth": 4, "second": 2}
    airflow.over = {"third"}
    while waiting:
        (free,) = [name for name, day in waiting.items() if take(party(name, day)) is None]
        order.append(free)
        del waiting[free]
        airflow.over.add(free)
    assert order == ["first", "second", "fourth", "fifth"]


def test_who_waits_no_more_is_not_waited_for(take: Callable[..., str | None], airflow: Airflow) -> None:
    take(party("holder"))
    take(party("cleared", 2))
    take(party("waits", 3))
    airflow.over = {"holder"}
    assert take(party("waits", 3)) == "cleared"
    airflow.gone = {"cleared"}
    assert take(party("waits", 3)) is None
    assert take(party("cleared", 2)) == "waits", "who comes back waits again"


def test_who_skips_takes_no_place(take: Callable[..., str | None], airflow: Airflow) -> None:
    take(party("holder"))
    assert take(party("skips", 2), wait=False) == "holder"
    airflow.over = {"holder"}
    assert take(party("later", 3)) is None


def test_looking_changes_nothing(runs: Store, airflow: Airflow) -> None:
    turns = Turns(runs, MODEL)
    assert turns.ahead(party("first"), airflow.asked) is None
    assert turns.holder() is None
    turns.take(party("first"), airflow.asked)
    ahead = turns.ahead(party("second"), airflow.asked)
    assert str(ahead) == "a_dag/first"


def test_one_of_many_at_once_gets_it(take: Callable[..., str | None]) -> None:
    gate, found = threading.Barrier(8), dict[str, str | None]()

    def race(name: str) -> None:
        gate.wait(30)
        found[name] = take(party(name))

    racers = [threading.Thread(target=race, args=(f"run-{number}",)) for number in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    (winner,) = [name for name, blocker in found.items() if blocker is None]
    assert {blocker for name, blocker in found.items() if name != winner} == {winner}
