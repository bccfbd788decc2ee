"""How a run ends, and who completes it when its supervisor could not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.tracking.conftest import Begin, Claim, Job, finished, train, written

from mxdist.spec import JobState
from mxdist.store import Cause
from mxdist.tracking.forwarder import Forwarder, replay
from mxdist.tracking.replay import _successor
from support.mlflow_proxy import MlflowProxy

pytestmark = pytest.mark.usefixtures("no_slow_calls")


def test_the_next_attempt_sends_what_the_first_could_not(
    begin: Begin, proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, tmp_path: Path, mlflow_has: Any
) -> None:
    proxy.always("500")
    job, first, forwarder = begin()
    train(journal, range(1, 58))
    assert not forwarder.close(JobState.PREEMPTED, timeout_s=2).complete
    finished(first, JobState.PREEMPTED)
    proxy.always("pass")
    changed = make_job(proxy.url, parallelism={"world_size": 2}, optimizer={"learning_rate": 0.25})
    second = claim(changed, after=1, origin=1)
    later = tmp_path / "second.jsonl"
    assert "attempt 2 goes on" in replay(first, job).message
    forwarder = Forwarder(second, changed, later)
    forwarder.start()
    train(later, range(51, 81))
    assert forwarder.close(JobState.SUCCEEDED).complete
    run = mlflow_has.run(job)
    assert mlflow_has.points(job) == written(journal) + [point for point in written(later) if point[0] > 57]
    assert run.data.params["optimizer.learning_rate"] == "0.05"
    assert run.data.params["parallelism.world_size"] == "1"
    retry = {key: value for key, value in run.data.tags.items() if key.startswith("mxdist.retry.")}
    assert retry == {"mxdist.retry.2.optimizer.learning_rate": "0.25", "mxdist.retry.2.parallelism.world_size": "2"}
    assert (run.info.status, run.data.tags["mxdist.attempt"]) == ("FINISHED", "2")
    assert replay(first, job).complete, "the second attempt has brought what the first could not"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (JobState.SUCCEEDED, "FINISHED"),
        (JobState.FAILED, "FAILED"),
        (JobState.DEADLINE, "FAILED"),
        (JobState.CANCELLED, "KILLED"),
        (JobState.PREEMPTED, "RUNNING"),
    ],
)
def test_the_last_state_is_the_true_one(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, state: JobState, status: str
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    attempt.request_cancel("airflow", "marked success", marked_success=True)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
    assert forwarder.close(state).complete
    run = mlflow_has.run(job)
    assert (run.info.status, run.data.tags["mxdist.state"]) == (status, state.value)
    assert ("mxdist.marked_success" in run.data.tags) == (state is JobState.CANCELLED)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_supervisor_that_was_killed_leaves_its_run_to_the_replay(
    begin: Begin, journal: Path, mlflow_has: Any, state: JobState
) -> None:
    job, attempt, forwarder = begin()
    train(journal, range(5))
    assert forwarder.drain(60)
    assert "has not ended" in replay(attempt, job).message
    assert replay(finished(attempt, state), job).complete
    assert mlflow_has.run(job).info.status == {"FAILED": "FAILED", "CANCELLED": "KILLED"}[state.value]


def test_a_fenced_attempt_stops_writing(begin: Begin, claim: Claim, journal: Path, mlflow_has: Any) -> None:
    job, attempt, forwarder = begin()
    train(journal, range(5))
    assert forwarder.drain(60)
    claim(job, after=1, origin=1)
    train(journal, range(5, 10))
    outcome = forwarder.close(JobState.SUCCEEDED, timeout_s=60)
    assert not outcome.complete
    assert "newer attempt" in outcome.message
    assert [step for step, _, _ in mlflow_has.points(job)] == list(range(5))
    assert mlflow_has.run(job).info.status == "RUNNING"


def test_a_run_deleted_in_mlflow_is_left_alone(begin: Begin, journal: Path, mlflow_has: Any, eventually: Any) -> None:
    job, attempt, forwarder = begin()
    eventually(lambda: forwarder.run_id)
    mlflow_has.client.call("delete_run", forwarder.run_id)
    train(journal, range(5))
    outcome = forwarder.close(JobState.SUCCEEDED)
    assert outcome.complete
    assert "deleted" in outcome.message
    assert mlflow_has.runs(job) == []
    assert replay(finished(attempt), job).complete


@pytest.mark.parametrize(
    ("told", "state", "status"),
    [
        (JobState.SUCCEEDED, JobState.CANCELLED, "KILLED"),
        (JobState.SUCCEEDED, JobState.FAILED, "FAILED"),
        (JobState.FAILED, JobState.CANCELLED, "KILLED"),
        (JobState.PREEMPTED, JobState.CANCELLED, "KILLED"),
        (JobState.FAILED, JobState.PREEMPTED, "RUNNING"),
    ],
)
def test_run_that_was_closed_otherwise_than_the_result_says_is_mended(
    begin: Begin,
    proxy: MlflowProxy,
    journal: Path,
    mlflow_has: Any,
    told: JobState,
    state: JobState,
    status: str,
) -> None:
    job, attempt, forwarder = begin()
    train(journal, range(5))
    assert forwarder.close(told).complete  # and killed here, before its result
    finished(attempt, state, Cause("cancel", "cancelled by user"))
    assert replay(attempt, job).complete
    run = mlflow_has.run(job)
    assert (run.info.status, run.data.tags["mxdist.state"]) == (status, state.value)
    assert run.data.tags["mxdist.cause"] == "cancel: cancelled by user"
    assert mlflow_has.points(job) == written(journal)
    proxy.seen.clear()
    assert replay(attempt, job).complete
    assert proxy.seen == [], "what is true already is not told again"


@pytest.mark.parametrize("how", ["given up", "cancelled before"])
def test_run_of_a_preempted_training_is_closed_when_nobody_goes_on(
    begin: Begin, claim: Claim, proxy: MlflowProxy, journal: Path, mlflow_has: Any, how: str
) -> None:
    job, attempt, forwarder = begin()
    train(journal, range(5))
    assert forwarder.close(JobState.PREEMPTED).complete
    finished(attempt, JobState.PREEMPTED)
    assert replay(attempt, job).complete
    assert mlflow_has.run(job).info.status == "RUNNING"
    (attempt.give_up if how == "given up" else attempt.request_cancel)("user", "enough of it")
    assert replay(attempt, job).complete
    run = mlflow_has.run(job)
    assert (run.info.status, run.data.tags["mxdist.state"]) == ("KILLED", "CANCELLED")
    assert run.data.tags["mxdist.cause"] == "given-up: preempted, and nobody goes on with it: enough of it"
    proxy.seen.clear()
    assert replay(attempt, job).complete
    assert proxy.seen == [], "what is true already is not told again"


def test_run_that_was_given_up_goes_on_all_the_same(begin: Begin, claim: Claim, journal: Path, mlflow_has: Any) -> None:
    job, first, forwarder = begin()
    assert forwarder.close(JobState.PREEMPTED).complete
    finished(first, JobState.PREEMPTED)
    first.give_up("airflow", "the DAG run is over")
    second = claim(job, after=1, origin=1)
    assert replay(first, job).complete
    assert mlflow_has.run(job).info.status == "RUNNING"
    assert replay(finished(second), job).complete
    assert mlflow_has.run(job).info.status == "FINISHED"


def test_attempt_that_goes_on_is_found_whatever_began_from_scratch_since(make_job: Job, claim: Claim) -> None:
    job = make_job(None)
    origins = {1: 1, 2: 1, 3: 3, 4: 1, 5: 5}
    attempts = {number: claim(job, after=number - 1, origin=origin) for number, origin in origins.items()}
    found = {number: _successor(attempt) for number, attempt in attempts.items()}

    numbers = {number: later and later.number for number, later in found.items()}
    assert numbers == {
        1: 4,
        2: 4,
        3: None,
        4: None,
        5: None,
    }


def test_attempt_that_goes_on_has_the_last_word(begin: Begin, claim: Claim, journal: Path, mlflow_has: Any) -> None:
    job, first, forwarder = begin()
    train(journal, range(5))
    assert forwarder.close(JobState.FAILED, cause=Cause("rank_exit", "it broke")).complete
    second = claim(job, after=1, origin=1)
    finished(first, JobState.CANCELLED)  # not what MLflow was told, but no longer the state of this run

    waiting = replay(first, job)
    assert (waiting.complete, waiting.message) == (False, "attempt 2 goes on with this run")
    assert replay(finished(second), job).complete
    assert replay(first, job).complete
    assert mlflow_has.run(job).info.status == "FINISHED"
