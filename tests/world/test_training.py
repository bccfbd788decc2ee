"""mxdist's own loop under the supervisor: preempted, resumed, replayed, and never begun on damaged data."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from world.conftest import Jobs, log_of, wait_until
from world.toy import job_on

from mxdist.spec import JobState


def test_one_flipped_byte_ends_the_job_before_its_first_step(
    jobs: Jobs, dataset: dict[str, Any], tmp_path: Path
) -> None:
    largest = max(
        (path for path in (tmp_path / "data").rglob("*") if path.is_file()), key=lambda one: one.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.chmod(0o600)
    largest.write_bytes(content)
    attempt = jobs.submit(job_on(dataset)).attempt
    result = jobs.result(attempt)

    assert (result.state, result.steps, result.restarts) == (JobState.FAILED, 0, 0)
    assert result.cause is not None
    assert (result.cause.kind, "train/x.npy" in result.cause.message) == ("data", True), result.cause
    assert attempt.journal.last() == 0


def test_preempted_training_goes_on_from_its_checkpoint(jobs: Jobs, dataset: dict[str, Any]) -> None:
    job = job_on(dataset, epochs=2000)
    first = jobs.submit(job).attempt
    wait_until(lambda: first.read_state().step > 8, "some steps")
    os.kill(jobs.supervisor(first), signal.SIGTERM)
    result = jobs.result(first)
    assert result.state is JobState.PREEMPTED
    assert result.steps > 8

    second = jobs.submit(job).attempt
    assert second.claim.origin == 1
    wait_until(lambda: second.read_state().step >= result.steps, "steps beyond the first attempt's")
    jobs.client.cancel(second, by="user", reason="test")
    records = [record for _, chunk in second.journal.read() for record in chunk["records"]]
    assert min(record["step"] for record in records) >= result.steps, "nothing is computed twice"


def test_killed_rank_goes_on_from_the_last_checkpoint(jobs: Jobs, dataset: dict[str, Any]) -> None:
    attempt = jobs.submit(job_on(dataset, epochs=2000, checkpoints={"every_steps": 4})).attempt
    wait_until(lambda: attempt.read_state().step > 8, "some steps")
    os.kill(jobs.rank_pids(attempt, 2)[1], signal.SIGKILL)
    wait_until(lambda: attempt.read_state().world == 2, "the second world")
    step = wait_until(lambda: attempt.read_state().ranks and attempt.read_state().step, "its steps")
    jobs.client.cancel(attempt, by="user", reason="test")

    assert step > 4
    assert any("rank 1 was killed by SIGKILL" in line for line in log_of(attempt))
