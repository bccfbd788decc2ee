"""Whoever follows a job asks its platform when no heartbeat comes: seldom, and patiently."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from mxdist.cli.follow import Follower, describe_result
from mxdist.errors import LaunchError
from mxdist.launch import Life
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, JobRun, Result, State, open_store


class Clock:
    """A clock of its own: sleeping takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        monkeypatch.setattr("mxdist.cli.follow.time", self)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def attempt_of(tmp_path: Path, **limits: float) -> Attempt:
    job = TrainingJob.parse({"name": "job", "script": {"path": "/train.py"}, "limits": limits})
    return JobRun(open_store(str(tmp_path / "runs")), "job-1").claim(job, after=0)


def follow(attempt: Attempt, client: Mock, revive: Mock, *, clock: Clock, for_s: float) -> None:
    follower, until = Follower(client, attempt, revive=revive, progress=None), clock.now + for_s
    while clock.now < until:
        follower._look()
        clock.sleep(1.0)


def test_a_job_in_the_queue_is_asked_about_seldom(tmp_path: Path, clock: Clock) -> None:
    client, revive = Mock(), Mock()
    client.launcher.life.return_value = Life.ALIVE
    follow(attempt_of(tmp_path), client, revive, clock=clock, for_s=600)
    assert 20 <= client.launcher.life.call_count <= 25
    revive.assert_not_called()


def test_a_lost_supervisor_is_found_at_once(tmp_path: Path, clock: Clock) -> None:
    client, revive, attempt = Mock(), Mock(), attempt_of(tmp_path)
    client.launcher.life.return_value = Life.ALIVE
    follow(attempt, client, revive, clock=clock, for_s=300)
    attempt.write_state(State(heartbeat=clock.now))
    follow(attempt, client, revive, clock=clock, for_s=8)
    client.launcher.life.return_value = Life.DEAD
    follow(attempt, client, revive, clock=clock, for_s=5)
    revive.assert_called()


def test_a_platform_that_does_not_answer_is_asked_again(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    client, revive = Mock(), Mock()
    client.launcher.life.side_effect = [LaunchError("squeue failed: Socket timed out"), Life.ALIVE, Life.DEAD]
    follow(attempt_of(tmp_path), client, revive, clock=clock, for_s=7)
    revive.assert_called_once()
    assert "Socket timed out" in capsys.readouterr().err


def test_a_platform_that_cannot_be_asked_ends_it(tmp_path: Path, clock: Clock) -> None:
    client = Mock()
    client.launcher.life.side_effect = LaunchError("no such partition", retryable=False)
    with pytest.raises(LaunchError, match="no such partition"):
        follow(attempt_of(tmp_path), client, Mock(), clock=clock, for_s=1)


def test_a_job_whose_time_is_up_in_the_queue_is_ended(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, revive, attempt = Mock(), Mock(), attempt_of(tmp_path, deadline_s=60)
    client.launcher.life.return_value = Life.ALIVE
    monkeypatch.setattr("mxdist.launch.client.time", clock)
    clock.now = attempt.claim.deadline_at or 0.0
    follow(attempt, client, revive, clock=clock, for_s=-1)
    revive.assert_not_called()
    clock.sleep(1)
    follow(attempt, client, revive, clock=clock, for_s=1)
    revive.assert_called()


def test_the_end_says_what_mlflow_lacks_and_why_until_it_has_everything(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path)
    error = "MLflow at http://m refused the login."
    result = attempt.finish(
        Result(state=JobState.SUCCEEDED, ended_at=1.0, tracking_complete=False, tracking_error=error)
    )
    assert f"incomplete: {error}; `mxdist reconcile` sends the rest" in describe_result(attempt, result)
    later = {"run_id": "r", "run_url": "http://m/#/runs/r", "complete": True, "registered_version": "3"}
    attempt.store.write_json("tracking.json", later)
    told = describe_result(attempt, result)
    assert "incomplete" not in told
    assert "mlflow      http://m/#/runs/r" in told
    assert "registered  version 3" in told


def test_a_preempted_job_that_was_given_up_is_told_as_mlflow_has_it(tmp_path: Path) -> None:
    attempt = attempt_of(tmp_path)
    result = attempt.finish(Result(state=JobState.PREEMPTED, ended_at=1.0))
    assert "state       PREEMPTED" in describe_result(attempt, result)
    attempt.give_up(by="user", reason="the DAG run was deleted")
    told = describe_result(attempt, result)
    assert "state       CANCELLED" in told
    assert "preempted, and nobody goes on with it: the DAG run was deleted" in told
