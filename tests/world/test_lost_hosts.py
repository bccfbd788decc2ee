"""Hosts that are lost, and supervisors that are: named, ended by their guards, and trained on from the checkpoint."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from world.conftest import Jobs, log_of, wait_until
from world.hosts import CLUSTER, FIRST, SECOND, THIRD, across, agent, carrying, on_hosts
from world.toy import job_on

from mxdist import processes
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt

pytestmark = pytest.mark.layouts

LINK_S = 4.0
SILENT = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("begun", flush=True)
    time.sleep(100_000)
"""


def silent(jobs: Jobs, **limits: float) -> Attempt:
    """Start a job whose ranks say nothing and hear nothing; return it once both run."""
    on_hosts(jobs)
    attempt = jobs.submit(across(jobs.job(SILENT, ranks=2, **{"link_timeout_s": LINK_S, **limits}))).attempt
    wait_until(lambda: len([line for line in log_of(attempt) if line.endswith("begun")]) == 2, "both ranks")
    assert len(carrying(attempt)) == 2, "an agent and its rank"
    return attempt


def long_training(dataset: dict[str, Any]) -> TrainingJob:  # noqa: F811
    limits = {"grace_s": 5, "max_restarts": 2}
    return job_on(dataset, epochs=2000, checkpoints={"every_steps": 4}, cluster=CLUSTER, limits=limits)


def test_killed_agent_is_a_lost_host_and_its_rank_dies_with_it(jobs: Jobs) -> None:
    attempt = silent(jobs)
    os.kill(agent(attempt), signal.SIGKILL)
    result = jobs.result(attempt)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert (result.cause.kind, result.cause.host, result.cause.retryable) == ("host", SECOND, True)
    assert f"host {SECOND} is lost" in result.cause.message


def test_agent_that_says_nothing_is_a_lost_host(jobs: Jobs) -> None:
    """A stopped agent is a black hole: the connection stands, and nothing comes through it."""
    attempt = silent(jobs)
    os.kill(agent(attempt), signal.SIGSTOP)
    begin = time.monotonic()
    result = wait_until(attempt.result, "the result")
    took_s = time.monotonic() - begin

    assert (result.cause.kind, result.cause.host) == ("host", SECOND)
    assert f"it said nothing for {LINK_S:g} s" in result.cause.message
    assert took_s >= LINK_S
    wait_until(lambda: not processes.find(attempt.claim.token), "the end of all")


def test_supervisor_that_is_killed_leaves_no_rank_anywhere(jobs: Jobs) -> None:
    attempt = silent(jobs)
    os.kill(jobs.supervisor(attempt), signal.SIGKILL)

    wait_until(lambda: not processes.find(attempt.claim.token), "the end of all")


def test_supervisor_that_says_nothing_is_given_up_by_the_guard(jobs: Jobs) -> None:
    """The agent hears neither a word nor an end: a cut cable."""
    attempt = silent(jobs)
    supervisor = jobs.supervisor(attempt)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        wait_until(lambda: not carrying(attempt), "the end of the other host's processes")
        assert processes.find(attempt.claim.token), "our own are the supervisor's affair"
    finally:
        os.kill(supervisor, signal.SIGCONT)
    result = jobs.result(attempt)
    assert result.cause is not None
    assert (result.cause.kind, result.cause.host) == ("host", SECOND)


def test_cancel_ends_silent_ranks_on_all_hosts(jobs: Jobs) -> None:
    attempt = silent(jobs, grace_s=1)

    assert jobs.client.cancel(attempt, by="user", reason="enough", wait_s=120).state is JobState.CANCELLED
    assert processes.find(attempt.claim.token) == []


def test_stopped_rank_of_another_host_is_a_stall_with_its_host(jobs: Jobs) -> None:
    attempt = silent(jobs, stall_timeout_s=2)
    (rank,) = set(carrying(attempt)) - {agent(attempt)}
    os.kill(rank, signal.SIGSTOP)
    result = jobs.result(attempt)

    assert result.cause is not None
    assert (result.cause.kind, result.cause.rank, result.cause.host) == ("stall", 1, SECOND)
    assert "rank 1 has been stopped by a signal for 2 s" in result.cause.message


def test_failure_of_a_rank_elsewhere_is_its_own(jobs: Jobs) -> None:
    script = """
        import os, sys, time
        if os.environ["HOROVOD_RANK"] == "1":
            sys.exit("what went wrong")
        time.sleep(100_000)
    """
    on_hosts(jobs)
    result = jobs.result(jobs.submit(across(jobs.job(script, ranks=2))).attempt)

    assert result.cause is not None
    assert (result.cause.rank, result.cause.host, result.cause.exit_code) == (1, SECOND, 1)
    assert "what went wrong" in result.cause.message


def test_training_goes_on_from_its_checkpoint_after_a_lost_host(jobs: Jobs, dataset: dict[str, Any]) -> None:  # noqa: F811
    on_hosts(jobs)
    attempt = jobs.submit(long_training(dataset)).attempt
    wait_until(lambda: attempt.read_state().step > 8, "some steps")
    os.kill(agent(attempt), signal.SIGKILL)
    wait_until(lambda: attempt.read_state().world == 2, "the second world")
    step = wait_until(lambda: attempt.read_state().ranks and attempt.read_state().step, "its steps")
    wait_until(lambda: attempt.read_state().step > step, "more steps")
    jobs.client.cancel(attempt, by="user", reason="test", wait_s=120)

    assert step > 4
    assert any(f"host {SECOND} is lost" in line and "starting again" in line for line in log_of(attempt))


def test_host_that_never_answers_is_named(jobs: Jobs) -> None:
    launcher = on_hosts(jobs)
    launcher.prefix = ["sh", "-c", "echo no route to it >&2; exit 255"]
    attempt = jobs.submit(across(jobs.job(SILENT, ranks=2, start_timeout_s=1))).attempt
    result = jobs.result(attempt)

    assert result.cause is not None
    assert (result.cause.kind, result.cause.host) == ("host", SECOND)
    assert "no route to it" in result.cause.message


def test_host_that_answers_late_is_waited_for(jobs: Jobs) -> None:
    launcher = on_hosts(jobs)
    up = jobs.folder / "up"
    launcher.prefix = ["sh", "-c", f'test -e {up} || {{ touch {up}.asked; exit 255; }}; exec "$@"', "sh"]
    attempt = jobs.submit(across(jobs.job("print('begun')", ranks=2))).attempt
    wait_until(up.with_name("up.asked").exists, "the first try")
    up.touch()
    result = jobs.result(attempt)

    assert (result.state, result.restarts) == (JobState.SUCCEEDED, 0), result.cause
    assert any(f"host {SECOND} is lost" in line and "trying again" in line for line in log_of(attempt))


def test_training_goes_on_without_a_host_that_never_comes_back(
    jobs: Jobs,
    dataset: dict[str, Any],  # noqa: F811
) -> None:
    launcher = on_hosts(jobs)
    down = jobs.folder / "down"
    launcher.prefix = ["sh", "-c", f'test -e {down}-$1 && exit 255; shift; exec "$@"', "sh", "{host}"]
    cluster = {**CLUSTER, "hosts": [*CLUSTER["hosts"], f"{THIRD}:1"]}
    attempt = jobs.submit(across(long_training(dataset), cluster=cluster)).attempt
    wait_until(lambda: attempt.read_state().step > 8, "some steps")
    (jobs.folder / f"down-{SECOND}").touch()
    os.kill(agent(attempt), signal.SIGKILL)
    wait_until(lambda: attempt.read_state().world == 2, "the second world")
    hosts = wait_until(lambda: [rank["host"] for rank in attempt.read_state().ranks], "its ranks")
    wait_until(lambda: attempt.read_state().step > 8, "more steps")
    jobs.client.cancel(attempt, by="user", reason="test", wait_s=120)

    assert hosts == [FIRST, THIRD]
    assert any(f"host {SECOND} is lost" in line and "going on without it" in line for line in log_of(attempt))


def test_preempted_on_all_hosts_goes_on_later(jobs: Jobs, dataset: dict[str, Any]) -> None:  # noqa: F811
    on_hosts(jobs, here=None)
    job = long_training(dataset)
    job = job.model_copy(update={"limits": job.limits.model_copy(update={"grace_s": 60})})
    attempt = jobs.submit(job).attempt
    wait_until(lambda: attempt.read_state().step > 8, "some steps")
    os.kill(jobs.supervisor(attempt), signal.SIGTERM)
    result = jobs.result(attempt)

    assert result.state is JobState.PREEMPTED, result.cause
    again = jobs.submit(job).attempt
    wait_until(lambda: again.read_state().step >= result.steps, "steps beyond the first attempt's")
    jobs.client.cancel(again, by="user", reason="test", wait_s=120)
    records = [record for _, chunk in again.journal.read() for record in chunk["records"]]
    assert min(record["step"] for record in records) >= result.steps, "nothing is computed twice"
