"""mxdist's own loop under the supervisor, with MLflow: trained, published, recorded, preempted, resumed, replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world.conftest import Jobs, log_of, wait_until

from mxdist.data.stage import stage
from mxdist.reconcile import finish_all
from mxdist.spec import JobState, TrainingJob, parse_job
from stack.mlflow import Mlflow
from support.mlflow_proxy import MlflowProxy

ALONE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mxdist":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import mlflow, numpy
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
print(json.dumps(model.predict(numpy.load(sys.argv[3])).tolist()))
"""
WATCHED = """
import os, socket, sys
from pathlib import Path
from mxnet.gluon import nn

place = Path(__file__).with_name(f"contacts-{os.getpid()}")

def note(text):
    with os.fdopen(os.open(place, os.O_CREAT | os.O_APPEND | os.O_WRONLY), "w") as file:
        file.write(text + "\\n")

def hook(event, args):
    if event == "socket.connect":
        note(f"connect {args[1]}")
    elif event == "import" and args[0].partition(".")[0] == "mlflow":
        note(f"import {args[0]}")

note(f"imported {'mlflow' in sys.modules}")
sys.addaudithook(hook)
with socket.socket(type=socket.SOCK_DGRAM) as seen:
    seen.connect(("127.0.0.1", 9))

def network(params):
    return nn.Dense(params["classes"])
"""


def staged(tmp_path: Path, uri: str, **access: Any) -> dict[str, Any]:
    """Stage two classes of 8 x 8 images that anything can tell apart, and return what a job says of them."""
    chance = np.random.default_rng(0)
    for split, count in (("train", 64), ("validation", 16), ("test", 16)):
        folder = tmp_path / "source" / split
        folder.mkdir(parents=True)
        labels = np.arange(count) % 2
        images = chance.integers(0, 60, (count, 1, 8, 8)) + 150 * labels[:, None, None, None]
        np.save(folder / "x.npy", images.astype(np.uint8))
        np.save(folder / "y.npy", labels.astype(np.int64))
    found = stage(str(tmp_path / "source"), uri, "toy", **access)
    return {"manifest_uri": found["manifest_uri"], "version": found["version"]}


@pytest.fixture
def dataset(tmp_path: Path) -> dict[str, Any]:
    """A dataset in a folder."""
    return staged(tmp_path, str(tmp_path / "data"))


def job_on(dataset: dict[str, Any], **changes: Any) -> TrainingJob:
    job = parse_job({
        "name": "toy", "model": {"name": "mlp"}, "dataset": dataset, "batch_size": 16, "epochs": 3,
        "parallelism": {"world_size": 2}, "limits": {"grace_s": 60, "max_restarts": 2}, **changes,
    })  # fmt: skip
    assert isinstance(job, TrainingJob)
    return job


def tracked(server: Mlflow, test: str) -> dict[str, Any]:
    """Return the tracking of a job in an experiment of its own."""
    return {"uri": server.url, "experiment": test, "registered_model": f"model-{test}"}


def runs_of(server: Mlflow, experiment: str) -> list[Any]:
    """Return the experiment's runs; none while the server does not know it."""
    from mlflow import MlflowClient

    client = MlflowClient(server.url)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id])) if found else []


def test_model_is_trained_published_and_recorded(jobs: Jobs, dataset: dict[str, Any], mlflow_server: Mlflow) -> None:
    attempt = jobs.submit(job_on(dataset, tracking=tracked(mlflow_server, "whole"))).attempt
    result = jobs.result(attempt)

    assert result.state is JobState.SUCCEEDED, result.cause
    assert result.steps == 12
    assert result.tracking_complete
    assert result.model_uri == f"{attempt.store.uri}/model"
    manifest = json.loads((Path(str(result.model_uri)) / "manifest.json").read_text())
    assert manifest["digest"] == result.model_digest
    (run,) = runs_of(mlflow_server, "whole")
    assert (run.info.run_id, run.info.status) == (result.mlflow_run_id, "FINISHED")
    assert result.registered_version == "1"
    state = attempt.read_state()
    assert (state.state, state.epoch, state.epochs, state.step) == (JobState.SUCCEEDED, 3, 3, 12)


def test_registered_model_predicts_what_the_network_says_without_mxdist(
    jobs: Jobs, dataset: dict[str, Any], mlflow_server: Mlflow, tmp_path: Path
) -> None:
    attempt = jobs.submit(job_on(dataset, tracking=tracked(mlflow_server, "pyfunc"))).attempt
    result = jobs.result(attempt)
    assert result.registered_version == "1", result.tracking_message
    x = tmp_path / "source" / "test" / "x.npy"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", ALONE, mlflow_server.url, "models:/model-pyfunc/1", str(x)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    # What the network says, by numpy alone, from the weights that were published.
    (file,) = Path(str(result.model_uri)).rglob("params.npz")
    with np.load(file) as weights:
        values = np.load(x).reshape(16, 64) / 255
        for layer in ("features.0", "features.1", "output"):
            values = values @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            values = values if layer == "output" else np.maximum(values, 0)
    powers = np.exp(values)
    expected = powers / powers.sum(axis=1, keepdims=True)
    assert np.allclose(json.loads(done.stdout.splitlines()[-1]), expected, atol=1e-5)


def test_ranks_have_nothing_to_do_with_an_mlflow_that_never_answers(
    jobs: Jobs, dataset: dict[str, Any], mlflow_server: Mlflow, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe" / "watched.py"
    recipe.parent.mkdir()
    recipe.write_text(WATCHED)
    with MlflowProxy(mlflow_server.url) as proxy:
        proxy.always("hang")
        where = {"uri": proxy.url, "experiment": "hung"}
        attempt = jobs.submit(job_on(dataset, model={"recipe": str(recipe)}, tracking=where)).attempt
        result = jobs.result(attempt)
        port = proxy.url.rpartition(":")[2]
    assert (result.state, result.steps) == (JobState.SUCCEEDED, 12), result.cause
    assert proxy.seen  # by the supervisor, which never got an answer
    for rank in attempt.read_state().ranks:
        (file,) = tmp_path.rglob(f"contacts-{rank['pid']}")
        contacts = file.read_text().splitlines()
        assert contacts[:2] == ["imported False", "connect ('127.0.0.1', 9)"]  # so the watch works
        assert [line for line in contacts if line.startswith("import ") or f", {port})" in line] == []


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


def test_mlflow_away_from_the_start_is_told_later(jobs: Jobs, dataset: dict[str, Any], mlflow_server: Mlflow) -> None:
    mlflow_server.stop()
    attempt = jobs.submit(job_on(dataset, tracking=tracked(mlflow_server, "late"))).attempt
    result = jobs.result(attempt)
    assert result.state is JobState.SUCCEEDED, result.cause
    assert not result.tracking_complete

    mlflow_server.start()
    # A server that has only just started may still be too slow for one call; the next reconcile goes on.
    wait_until(lambda: [step.good for step in finish_all(jobs.client)] == [True], "the whole run")
    (run,) = runs_of(mlflow_server, "late")
    assert run.info.status == "FINISHED"
    assert run.data.metrics


def test_cancelled_training_is_killed_in_mlflow(jobs: Jobs, dataset: dict[str, Any], mlflow_server: Mlflow) -> None:
    job = job_on(dataset, epochs=2000, tracking=tracked(mlflow_server, "cancelled"))
    attempt = jobs.submit(job).attempt
    wait_until(lambda: attempt.read_state().mlflow_run_id, "the run")
    assert jobs.client.cancel(attempt, by="user", reason="test", wait_s=240).state is JobState.CANCELLED

    (run,) = runs_of(mlflow_server, "cancelled")
    assert run.info.status == "KILLED"
