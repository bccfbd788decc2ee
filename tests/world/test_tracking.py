"""mxdist's own loop with MLflow: recorded, registered, told later, and never held up by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from world.conftest import Jobs, wait_until
from world.toy import job_on

from mxdist.reconcile import finish_all
from mxdist.spec import JobState
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
        where = {"uri": proxy.url, "experiment": "hung", "wait_s": 5}
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


def test_mlflow_away_from_the_start_is_told_later(jobs: Jobs, dataset: dict[str, Any], mlflow_server: Mlflow) -> None:
    mlflow_server.stop()
    attempt = jobs.submit(job_on(dataset, tracking={**tracked(mlflow_server, "late"), "wait_s": 5})).attempt
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
