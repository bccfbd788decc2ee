"""Attempts: claimed once, fenced by the next, ended once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mxdist.errors import Fenced, NotFound
from mxdist.spec import JobState, TrainingJob, parse_job
from mxdist.store import Cause, Claim, JobRun, Result, State, Store
from mxdist.store.run import INDEX


def job(**changes: object) -> TrainingJob:
    parsed = parse_job({"name": "train", "script": {"path": "train.py"}, **changes})
    assert isinstance(parsed, TrainingJob)
    return parsed


def test_two_submitters_share_one_attempt(open_again: Callable[[], Store]) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = {a.claim.token for a in pool.map(lambda _: JobRun(open_again(), "k").claim(job(), after=0), range(8))}
    assert len(tokens) == 1


def test_claim_remembers_what_was_asked(store: Store) -> None:
    asked = job(limits={"deadline_s": 60})
    JobRun(store, "k").claim(asked, after=0, source={"dag_id": "d"})
    latest = JobRun(store, "k").latest()
    assert latest
    assert latest.claim.parsed() == asked
    assert latest.claim.deadline_at == pytest.approx(latest.claim.submitted_at + 60)
    assert latest.claim.source == {"dag_id": "d"}
    assert latest.claim.training_id == "k#1"


def test_a_newer_attempt_fences_the_older_one(store: Store) -> None:
    run = JobRun(store, "k")
    old = run.claim(job(), after=0)
    old.check_fence()
    new = run.claim(job(), after=1, origin=1)
    with pytest.raises(Fenced, match="attempt 1 of k was replaced"):
        old.check_fence()
    new.check_fence()
    assert (new.number, new.claim.training_id) == (2, "k#1")
    assert run.latest().claim == new.claim  # type: ignore[union-attr]


def test_an_end_is_recorded_once(store: Store) -> None:
    attempt = JobRun(store, "k").claim(job(), after=0)
    assert attempt.result() is None
    failed = Result(JobState.FAILED, 1.0, Cause("rank_exit", "rank 1 ended with 3", rank=1, exit_code=3))
    assert attempt.finish(failed) == failed
    assert attempt.finish(Result(JobState.SUCCEEDED, 2.0)) == failed
    assert attempt.result() == failed


def test_state_cancel_and_hand_over(store: Store) -> None:
    attempt = JobRun(store, "k").claim(job(), after=0)
    assert attempt.read_state() == State()
    attempt.write_state(State(state=JobState.RUNNING, step=3, metrics={"loss": 0.5}))
    assert attempt.read_state() == State(state=JobState.RUNNING, step=3, metrics={"loss": 0.5})
    assert attempt.cancel_intent() is None
    first = attempt.request_cancel("user", "marked failed")
    assert attempt.request_cancel("deadline", "too late") == first == attempt.cancel_intent()
    assert not attempt.handed_over()
    attempt.hand_over()
    assert attempt.handed_over()


def test_documents_of_a_newer_version_are_read(store: Store) -> None:
    attempt = JobRun(store, "k").claim(job(), after=0)
    attempt.store.write_json("state.json", {"state": "RUNNING", "invented_later": 1})
    assert attempt.read_state().state is JobState.RUNNING
    assert Claim.load({**attempt.claim.dump(), "invented_later": 1}) == attempt.claim


def test_an_unknown_attempt_is_not_found(store: Store) -> None:
    assert JobRun(store, "k").latest() is None
    store.create_json(f"{INDEX}/other", {})
    with pytest.raises(NotFound):
        JobRun(store, "k").attempt(7)
