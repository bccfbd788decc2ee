"""An old world sleeps through its replacement and wakes up late: it may not write what counts any more."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from world.conftest import Jobs, wait_until
from world.test_tracking import runs_of, tracked
from world.toy import job_on

from mxdist import processes
from mxdist.spec import JobState
from mxdist.store import Attempt, JobRun
from stack.mlflow import Mlflow

ASLEEP = {
    "between two epochs": ["epoch-2-rank-0", "epoch-2-rank-1"],
    "before its checkpoint is published": ["checkpoint-4-written"],
    "before its model is published": ["supervisor-before-model"],
    "before its run is closed": ["supervisor-before-mlflow"],
    "before its result is written": ["supervisor-before-result"],
}


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=() if "closed" in name else pytest.mark.layouts) for name in ASLEEP]
)
def test_world_that_wakes_up_late_writes_nothing_that_counts(
    jobs: Jobs,
    dataset: dict[str, Any],
    mlflow_server: Mlflow,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    moment: str,
) -> None:
    monkeypatch.setenv("MXDIST_BARRIERS", str(tmp_path))
    for name in ASLEEP[moment]:
        (tmp_path / f"job.{name}.hold").touch()
    experiment = f"fencing-{list(ASLEEP).index(moment)}"
    job = job_on(dataset, tracking=tracked(mlflow_server, experiment))
    old = jobs.submit(job).attempt
    for name in ASLEEP[moment]:
        wait_until((tmp_path / f"job.{name}.reached").exists, name)
    wait_until(lambda: _losses(mlflow_server, experiment), "MLflow to hear of the training")
    asleep = [process.pid for process in processes.find(old.claim.token)]
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    for hold in tmp_path.glob("*.hold"):
        hold.unlink()

    JobRun(jobs.client.runs, "job").claim(job, after=1, origin=1)  # as for a world that was lost, to go on with it
    new = jobs.submit(job).attempt
    assert new.number == 2
    assert jobs.result(new).state is JobState.SUCCEEDED
    written, recorded = _written(old), _recorded(mlflow_server, experiment)

    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not processes.find(old.claim.token), "the old world's end")
    assert _written(old) == written
    assert old.result() is None
    assert _recorded(mlflow_server, experiment) == recorded
    steps = [step for step, _ in _losses(mlflow_server, experiment)]
    assert steps == list(range(1, 13)), "64 examples in batches of 16, three times, each told once"


def _written(attempt: Attempt) -> list[str]:
    """Return what would count of an attempt: its checkpoints, model and result."""
    keys = [entry.key for entry in attempt.store.list("")]
    return sorted(key for key in keys if key.startswith(("checkpoints/index/", "model/", "result.json")))


def _losses(server: Mlflow, experiment: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    runs = runs_of(server, experiment)
    if not runs:
        return []
    (run,) = runs
    points = MlflowClient(server.url).get_metric_history(run.info.run_id, "loss")
    return sorted((point.step, point.value) for point in points)


def _recorded(server: Mlflow, experiment: str) -> str:
    """Return all that MLflow has of the one run and of the registered model."""
    from mlflow import MlflowClient

    client = MlflowClient(server.url)
    (run,) = runs_of(server, experiment)
    versions = client.search_model_versions(f"name = 'model-{experiment}'")
    told = {
        "status": run.info.status,
        "end": run.info.end_time,
        "metrics": run.data.metrics,
        "params": run.data.params,
        "tags": run.data.tags,
        "losses": _losses(server, experiment),
        "versions": sorted((one.version, one.source, sorted(one.aliases)) for one in versions),
    }
    return json.dumps(told, sort_keys=True)
