"""Training over two hosts: the weights of one process, whatever the layout, and everything of rank 0 comes home."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.test_law import BOUND, Law, make_law
from world.conftest import Jobs, jobs, log_of, wait_until  # noqa: F401  # a fixture
from world.hosts import CLUSTER, FIRST, SECOND, across, agent, disk, on_hosts

from mxdist.runtime.place import JOURNAL
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, Result
from mxdist.tracking.mirror import restore
from stack.mlflow import Mlflow

pytestmark = pytest.mark.layouts

LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"strategy": "hybrid", "inside": "devices", "devices": 2},
    {"strategy": "hybrid", "inside": "pipeline", "stages": 2, "micro_batches": 2},
    {"strategy": "pipeline", "stages": 2, "micro_batches": 2, "across": "processes", "world_size": 2},
)


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """73 examples: one rank has no row in the last batch."""
    return make_law(tmp_path_factory.mktemp("hosts") / "sgd", "sgd", 73)


def trained(maker: Jobs, job: TrainingJob) -> tuple[Attempt, Result]:
    attempt = maker.submit(job).attempt
    result = maker.result(attempt)
    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    return attempt, result


def weights(result: Result) -> dict[str, np.ndarray]:
    """Return the published parameters."""
    (path,) = Path(str(result.model_uri)).rglob("params.npz")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def records(attempt: Attempt) -> list[dict[str, Any]]:
    """Return what the journal in the run store holds."""
    return [record for _, chunk in attempt.journal.read() for record in chunk["records"]]


def losses(attempt: Attempt) -> np.ndarray:
    return np.array([record["value"] for record in records(attempt) if record["key"] == "loss"])


def off(law: Law, attempt: Attempt, result: Result) -> float:
    """Return the largest difference of a weight or a loss to the reference's."""
    found = weights(result)
    assert found.keys() == law.weights.keys()
    worst = max(float(np.abs(found[name] - law.weights[name]).max()) for name in found)
    return max(worst, float(np.abs(losses(attempt) - law.losses).max()))


@pytest.mark.parametrize("here", [FIRST, SECOND, None])
def test_two_hosts_have_the_weights_of_one_process(jobs: Jobs, law: Law, here: str | None) -> None:  # noqa: F811
    """The supervisor beside rank 0, beside rank 1, and on a host that has no rank."""
    on_hosts(jobs, here=here)
    attempt, result = trained(jobs, across(law._job(2, {})))

    assert off(law, attempt, result) < BOUND
    numbers = [record["n"] for record in records(attempt)]
    assert numbers == list(range(1, len(numbers) + 1)), "every line of the journal, once"
    assert result.steps == 20
    assert not list(disk(jobs).glob("*/*@*"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=["uneven", "devices", "pipeline", "stages of ranks"])
def test_uneven_hosts_and_hybrids_too(jobs: Jobs, law: Law, layout: dict[str, Any]) -> None:  # noqa: F811
    on_hosts(jobs)
    ranks = layout.get("world_size", 4)
    cluster = {**CLUSTER, "hosts": [f"{FIRST}:{ranks - 1}", f"{SECOND}:1"]}
    attempt, result = trained(jobs, across(law._job(ranks, {"parallelism": layout}), cluster=cluster))

    assert off(law, attempt, result) < BOUND
    places = [(rank["host"], rank["local_rank"]) for rank in attempt.read_state().ranks]
    assert places == [*((FIRST, local) for local in range(ranks - 1)), (SECOND, 0)]


def test_workers_and_servers_of_two_hosts(jobs: Jobs, law: Law) -> None:  # noqa: F811
    on_hosts(jobs)
    layout = {"strategy": "parameter_server", "servers": 2}
    attempt, result = trained(jobs, across(law._job(2, {"parallelism": layout, "dtype": "float32"})))

    assert np.abs(losses(attempt) - law.losses).max() < 1e-3, "KVStore computes in float32"
    assert weights(result).keys() == law.weights.keys()


def test_mlflow_has_every_step_once_when_rank_0_is_elsewhere(
    jobs: Jobs,  # noqa: F811
    law: Law,
    mlflow_server: Mlflow,
) -> None:
    from mlflow import MlflowClient

    on_hosts(jobs, here=None)
    tracking = {"uri": mlflow_server.url, "experiment": "elsewhere"}
    attempt, result = trained(jobs, across(law._job(2, {}), tracking=tracking))

    client = MlflowClient(mlflow_server.url)
    history = client.get_metric_history(str(result.mlflow_run_id), "loss")
    assert len(history) == len({point.step for point in history}) == 20
    assert result.tracking_complete
    assert json.loads((Path(str(result.model_uri)) / "manifest.json").read_text())["digest"] == result.model_digest


def test_journal_goes_on_when_the_host_of_rank_0_was_lost(jobs: Jobs, law: Law) -> None:  # noqa: F811
    on_hosts(jobs, here=None)
    job = across(law._job(2, {"epochs": 400, "checkpoints": {"every_steps": 5}}))
    attempt = jobs.submit(job).attempt
    wait_until(lambda: attempt.read_state().step > 10, "some steps")
    os.kill(agent(attempt, 0), signal.SIGKILL)
    wait_until(lambda: attempt.read_state().world == 2, "the second world")
    told = wait_until(lambda: [record for record in records(attempt) if record["session"] == 2], "its metrics")
    jobs.client.cancel(attempt, by="user", reason="test", wait_s=120)

    numbers = [record["n"] for record in records(attempt)]
    assert numbers == list(range(1, len(numbers) + 1)), "every line once, over both worlds"
    assert told[0]["step"] > 1, "from the checkpoint"


def test_journal_is_made_again_where_a_supervisor_goes_on_elsewhere(jobs: Jobs, law: Law) -> None:  # noqa: F811
    on_hosts(jobs)
    attempt, _ = trained(jobs, across(law._job(2, {})))
    here, elsewhere = jobs.attempt_dir(attempt) / JOURNAL, jobs.folder / JOURNAL

    assert restore(attempt, elsewhere)
    assert elsewhere.read_bytes() == here.read_bytes()
    assert not restore(attempt, elsewhere), "what is there stays"
