"""Stages as ranks under the supervisor: trained and published; a stage that dies does not leave the others waiting."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from world.conftest import Jobs, log_of, wait_until
from world.toy import job_on

from mxdist.spec import JobState

pytestmark = pytest.mark.layouts

STAGES = {"strategy": "pipeline", "stages": 2, "micro_batches": 4, "across": "processes", "world_size": 2}


def test_a_model_in_stages_is_trained_and_published(jobs: Jobs, dataset: dict[str, Any]) -> None:  # noqa: F811
    attempt = jobs.submit(job_on(dataset, parallelism=STAGES)).attempt
    result = jobs.result(attempt)
    assert result.state is JobState.SUCCEEDED, result.cause
    assert (result.steps, result.model_uri) == (12, f"{attempt.store.uri}/model")
    assert [result.metrics[f"pipeline_peak_activations_{stage}"] for stage in (0, 1)] == [2, 1]
    assert 0 < result.metrics["pipeline_bubble"] < 1


def test_a_killed_stage_ends_the_world_and_training_goes_on(jobs: Jobs, dataset: dict[str, Any]) -> None:  # noqa: F811
    job = job_on(dataset, epochs=2000, checkpoints={"every_steps": 4}, parallelism=STAGES)
    attempt = jobs.submit(job).attempt
    wait_until(lambda: attempt.read_state().step > 8, "some steps")
    os.kill(jobs.rank_pids(attempt, 2)[1], signal.SIGKILL)
    wait_until(lambda: attempt.read_state().world == 2, "the second world")
    step = wait_until(lambda: attempt.read_state().ranks and attempt.read_state().step, "its steps")
    jobs.client.cancel(attempt, by="user", reason="test")
    assert step > 4
    assert any("rank 1 was killed by SIGKILL" in line for line in log_of(attempt))
