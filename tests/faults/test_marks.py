"""A waiting task is marked, cleared or deleted, or its time is up: its job ends, and all three say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults.site import DOOMED_DAG_ID, RANKS, Run, Site, Trained, end_of, kept_running, wait_for

from mxdist.store import Attempt, Result

HELD = [f"epoch-2-rank-{rank}" for rank in range(RANKS)]
DEADLINE_S = 45.0
ACTS: dict[str, Callable[[Run], None]] = {
    "failed": lambda run: run.mark("failed"),
    "success": lambda run: run.mark("success"),
    "cleared": lambda run: run.clear(),
    "deleted": lambda run: run.delete(),
    "deadline": lambda run: None,
}


@pytest.fixture(scope="module")
def runs(site: Site) -> Iterator[dict[str, Run]]:
    """One run for each act, done while every rank was in its training and the task deferred."""
    with kept_running(*site.stack.airflow.services):
        yield _disturbed(site)


def _disturbed(site: Site) -> dict[str, Run]:
    special: dict[str, dict[str, Any]] = {"deadline": {"deadline_s": DEADLINE_S}, "deleted": {"dag_id": DOOMED_DAG_ID}}
    runs = {name: site.train(f"marked-{name}", hold=HELD, **special.get(name, {})) for name in ACTS}
    for name, run in runs.items():
        if name != "deadline":
            for barrier in HELD:
                run.reached(barrier)
            run.watched()
        ACTS[name](run)
    return runs


def _first(run: Run) -> tuple[Attempt, Result]:
    """Wait for the end of the first attempt; return it."""
    attempt = wait_for(run.attempts, f"{run.run_id} to be submitted")[0]
    return attempt, end_of(attempt)


def _tell(run: Run, result: Result) -> None:
    """Have the reconcile DAG tell MLflow, if the supervisor was so slow to end that it was killed before it did."""
    if not result.tracking_complete:
        run.site.reconcile()


@pytest.mark.parametrize("mark", ["failed", "success"])
def test_marked(runs: dict[str, Run], mark: str) -> None:
    run = runs[mark]
    attempt, result = _first(run)
    run.gone()
    assert run.ended()["state"] == mark
    assert result.state.value == "CANCELLED"
    assert _cancelled_by(attempt) == ("user", mark == "success")
    _tell(run, result)
    (record,) = run.recorded_as("KILLED")
    assert record.tags["mxdist.state"] == "CANCELLED"
    assert record.tags.get("mxdist.marked_success") == ("true" if mark == "success" else None)
    assert len(run.attempts()) == 1


def test_cleared(runs: dict[str, Run], undisturbed: Trained) -> None:
    run = runs["cleared"]
    attempt, result = _first(run)
    assert result.state.value == "CANCELLED"
    assert _cancelled_by(attempt) == ("user", False)
    run.release()
    assert run.ended()["state"] == "success"
    run.gone()
    first, second = run.attempts()
    assert second.claim.origin == second.number, "a clear starts again"
    again = second.result()
    assert again is not None
    assert (again.state.value, again.model_digest) == ("SUCCEEDED", undisturbed.model_digest)
    _tell(run, result)
    killed, finished = run.recorded_as("KILLED", "FINISHED")
    assert run.site.records.history(finished.run_id, "loss") == undisturbed.losses
    assert killed.tags["mxdist.attempt"] == str(first.number)


def test_deleted(runs: dict[str, Run]) -> None:
    run = runs["deleted"]
    attempt, result = _first(run)
    run.gone()
    assert run.deleted()
    assert result.state.value == "CANCELLED"
    assert _cancelled_by(attempt) == ("user", False)
    _tell(run, result)
    run.recorded_as("KILLED")


def test_deadline(runs: dict[str, Run]) -> None:
    run = runs["deadline"]
    attempt, result = _first(run)
    run.gone()
    assert run.ended()["state"] == "failed"
    assert run.task()["try_number"] == 1, "another try would only pass the deadline again"
    assert result.state.value == "DEADLINE"
    assert result.ended_at - attempt.claim.submitted_at >= DEADLINE_S
    (record,) = run.recorded_as("FAILED")
    assert record.tags["mxdist.state"] == "DEADLINE"


def _cancelled_by(attempt: Attempt) -> tuple[str, bool]:
    intent = attempt.cancel_intent()
    assert intent is not None
    return intent.by, intent.marked_success
