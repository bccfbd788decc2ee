"""What follows the failures that a job has a policy for."""

from __future__ import annotations

from typing import Any

import pytest
from world.conftest import Jobs, log_of
from world.hosts import FIRST, SECOND, THIRD, across, on_hosts

from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, Result

ONCE = """
    import os, sys
    from pathlib import Path
    done = Path(sys.argv[1], "failed-once")
    if not done.exists():
        done.touch()
        print("the share is slow today", flush=True)
        sys.exit(17)
    print("here is", os.environ["HOROVOD_HOSTNAME"], flush=True)
"""


def _run(jobs: Jobs, job: TrainingJob, *failures: dict[str, Any]) -> tuple[Attempt, Result]:
    attempt = jobs.submit(TrainingJob.parse({**job.to_document(), "failures": list(failures)})).attempt
    return attempt, jobs.result(attempt)


def test_known_exit_code_restarts_the_world(jobs: Jobs) -> None:
    attempt, result = _run(jobs, jobs.job(ONCE, max_restarts=1), {"exit_code": 17, "then": "restart"})
    assert (result.state, result.restarts) == (JobState.SUCCEEDED, 1)
    assert any("the job's policy for exit code 17: restart" in line for line in log_of(attempt))


def test_without_a_policy_it_does_not(jobs: Jobs) -> None:
    _, result = _run(jobs, jobs.job(ONCE, max_restarts=1), {"exit_code": 18, "then": "restart"})
    assert (result.state, result.restarts) == (JobState.FAILED, 0)
    assert result.cause is not None
    assert result.cause.retryable


@pytest.mark.parametrize(("then", "retryable"), [("fail", False), ("retry", True)])
def test_known_words_end_the_attempt(jobs: Jobs, then: str, retryable: bool) -> None:
    _, result = _run(jobs, jobs.job(ONCE, max_restarts=1), {"pattern": "share is slow", "then": then})
    assert (result.state, result.restarts) == (JobState.FAILED, 0)
    assert result.cause is not None
    assert result.cause.retryable is retryable
    assert f"'share is slow' in its log: {then}" in result.cause.message


@pytest.mark.layouts
def test_host_is_avoided_if_another_has_room(jobs: Jobs) -> None:
    on_hosts(jobs)
    script = ONCE.replace("if not done.exists()", f'if os.environ["HOROVOD_HOSTNAME"] == "{SECOND}"')
    cluster = {"kind": "ssh", "hosts": [f"{host}:1" for host in (FIRST, SECOND, THIRD)], "interface": "lo"}
    job = across(jobs.job(script, ranks=2, max_restarts=1), cluster=cluster)
    attempt, result = _run(jobs, job, {"exit_code": 17, "then": "avoid_host"})
    assert (result.state, result.restarts) == (JobState.SUCCEEDED, 1), result.cause
    said = "\n".join(log_of(attempt))
    assert f"{SECOND} is avoided from now on" in said
    assert f"here is {THIRD}" in said


@pytest.mark.layouts
def test_host_that_the_job_cannot_do_without_is_tried_again(jobs: Jobs) -> None:
    attempt, result = _run(jobs, jobs.job(ONCE, max_restarts=1), {"exit_code": 17, "then": "avoid_host"})
    assert (result.state, result.restarts) == (JobState.SUCCEEDED, 1)
    assert any("is to be avoided, but the job cannot do without it" in line for line in log_of(attempt))
