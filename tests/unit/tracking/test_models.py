"""The model is logged once, registered once, and predicts where mxdist is not."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxdist.data.stage import stage
from mxdist.errors import NotFound, StoreError, TrackingError
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, Result, Store
from mxdist.tracking import models
from mxdist.tracking.forwarder import Forwarder, replay
from mxdist.tracking.journal import JournalWriter
from support.mlflow_proxy import MlflowProxy
from support.places import node_python

Job = Callable[..., TrainingJob]
Claim = Callable[..., Attempt]

STAND_IN = """
import json, os
import numpy as np

class Predictor:
    def __init__(self, weights):
        self.weights = weights
    def predict(self, data, params=None):
        return (data.reshape(len(data), -1).astype("float32") @ self.weights)

def _load_pyfunc(path):
    return Predictor(np.load(os.path.join(path, "params.npz"), allow_pickle=False)["weights"])
"""


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A model as training exports it, small: four pixels, two classes."""
    folder = tmp_path / "exported"
    folder.mkdir()
    np.savez(folder / "params.npz", weights=np.arange(8, dtype="float32").reshape(4, 2))
    np.save(folder / "input_example.npy", np.ones((2, 1, 2, 2), dtype="uint8"))
    about = {"network": "lenet", "classes": 2, "input_shape": [1, 2, 2], "input_dtype": "uint8", "dtype": "float32"}
    (folder / "model.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "stand_in_model.py"
    path.parent.mkdir()
    path.write_text(STAND_IN)
    return path


@pytest.fixture
def built(tmp_path: Path, exported: Path, stand_in: Path, make_job: Job, claim: Claim) -> Path:
    job = make_job(None)
    return models.build(exported, tmp_path / "built", job=job, claim=claim(job, key="built").claim, code=stand_in)


def test_the_folder_predicts_in_the_node_environment_without_mxdist(built: Path, tmp_path: Path) -> None:
    code = (
        "import mlflow, numpy, sys;"
        "model = mlflow.pyfunc.load_model(sys.argv[1]);"
        "print(model.predict(numpy.ones((2, 1, 2, 2), 'uint8')).tolist());"
        "about = model.metadata.signature;"
        "print([str(item.type) for item in about.inputs], about.outputs.inputs[0].shape)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(node_python()), "-I", "-c", code, str(built)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[[12.0, 16.0], [12.0, 16.0]]", "['uint8'] (-1, 2)"]


def test_the_folder_can_be_built_there_too(exported: Path, stand_in: Path, tmp_path: Path, make_job: Job) -> None:
    code = (
        "import sys; from pathlib import Path; from mxdist.spec import parse_job;"
        "from mxdist.store import JobRun, open_store;"
        "from mxdist.tracking import models; a = [Path(x) for x in sys.argv[1:]];"
        "job = parse_job({'name': 'x', 'script': {'path': 'x.py'}});"
        "claim = JobRun(open_store(str(a[2])), 'k').claim(job, after=0).claim;"
        "print(models.digest(models.build(a[0], a[3], job=job, claim=claim, code=a[1])))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(models.__file__).parents[2])}
    command = [
        str(node_python()),
        "-c",
        code,
        str(exported),
        str(stand_in),
        str(tmp_path / "store"),
        str(tmp_path / "there"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == models.digest(exported)


def test_the_digest_is_that_of_the_exported_files(built: Path, exported: Path) -> None:
    assert models.digest(built) == models.digest(exported)
    assert models.exported(built) == built / "data" / "model"
    (exported / "model.json").write_text("{}")
    assert models.digest(built) != models.digest(exported)


@pytest.mark.parametrize("spoilt", ["model.json", "input_example.npy", "classes"])
def test_what_is_not_a_model_is_refused(
    exported: Path, stand_in: Path, tmp_path: Path, make_job: Job, claim: Claim, spoilt: str
) -> None:
    if spoilt == "classes":
        (exported / "model.json").write_text('{"classes": null}')
    else:
        (exported / spoilt).write_bytes(b"\x93torn")
    job = make_job(None)
    with pytest.raises(TrackingError, match="is no exported model"):
        models.build(exported, tmp_path / "out", job=job, claim=claim(job).claim, code=stand_in)


def test_publish_and_fetch(built: Path, runs: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        models.fetch(runs.child("model"), tmp_path / "none")
    assert models.publish(built, runs) == models.digest(built)
    fetched = models.fetch(runs.child("model"), tmp_path / "fetched")
    files = {path.relative_to(built): path.read_bytes() for path in built.rglob("*") if path.is_file()}
    assert {path.relative_to(fetched): path.read_bytes() for path in fetched.rglob("*") if path.is_file()} == files
    data = bytearray(runs.read("model/data/model/params.npz"))
    data[-1] ^= 1
    runs.write("model/data/model/params.npz", bytes(data))
    with pytest.raises(StoreError, match="params.npz is not what its manifest says"):
        models.fetch(runs.child("model"), tmp_path / "again")


def test_a_manifest_that_leads_elsewhere_is_refused(runs: Store, tmp_path: Path) -> None:
    runs.write_json("model/manifest.json", {"files": [{"path": "../../x", "size": 1, "sha256": "0"}]})
    with pytest.raises(StoreError, match="outside"):
        models.fetch(runs.child("model"), tmp_path / "fetched")


def versions(mlflow_has: Any, name: str) -> list[Any]:
    return list(mlflow_has.client.call("search_model_versions", f"name = '{name}'"))


def test_a_training_registers_one_version(
    proxy: MlflowProxy, make_job: Job, claim: Claim, built: Path, tmp_path: Path, mlflow_has: Any
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_text("a")
    for as_of in ("2026-04-01", "2026-05-01"):  # the same content is current again
        staged = stage(str(tmp_path / "source"), str(tmp_path / "data"), "digits", as_of=as_of)
    name = f"digits-{time.time_ns()}"
    dataset = {"manifest_uri": staged["manifest_uri"], "version": staged["version"]}
    job = make_job(proxy.url, dataset=dataset, tracking={"registered_model": name})
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, tmp_path / "journal.jsonl")
    forwarder.start()
    outcome = forwarder.close(JobState.SUCCEEDED, model_dir=built)
    assert (outcome.complete, outcome.registered_version) == (True, "1"), outcome.message
    (version,) = versions(mlflow_has, name)
    assert version.run_id == outcome.run_id
    expected = {
        "mxdist.job_key": "digits-1",
        "mxdist.dataset_version": staged["version"],
        "mxdist.dataset_as_of": "2026-05-01T00:00:00+00:00",
        "mxdist.model_digest": models.digest(built),
        "mxdist.model_uri": f"{attempt.store.uri}/model",
    }
    assert expected.items() <= version.tags.items()
    assert [output.model_id for output in mlflow_has.run(job).outputs.model_outputs] == [
        version.source.rpartition("/")[2]
    ]
    folder = mlflow_has.client.call("get_run", outcome.run_id)
    assert folder.info.status == "FINISHED"


@pytest.mark.parametrize(
    ("mood", "ending"),
    [
        ("lose", "/logged-models"),
        ("lose", "/model-versions/create"),
        ("500", "/model-versions/create"),
        ("500", "MLmodel"),
    ],
)
def test_a_model_half_logged_is_completed_by_the_replay(
    proxy: MlflowProxy,
    make_job: Job,
    claim: Claim,
    built: Path,
    tmp_path: Path,
    mlflow_has: Any,
    mood: str,
    ending: str,
) -> None:
    name = f"digits-{time.time_ns()}"
    job = make_job(proxy.url, tracking={"registered_model": name})
    attempt = claim(job)
    JournalWriter(tmp_path / "journal.jsonl").append({"loss": 1.0}, step=1)
    forwarder = Forwarder(attempt, job, tmp_path / "journal.jsonl")
    forwarder.start()
    assert forwarder.drain(60)
    proxy.once(mood, ending)
    outcome = forwarder.close(JobState.SUCCEEDED, model_dir=built)
    assert not outcome.complete
    assert mlflow_has.run(job).info.status == "FINISHED"  # the run tells the truth about the training all the same
    models.publish(built, attempt.store)
    attempt.finish(Result(state=JobState.SUCCEEDED, ended_at=time.time()))
    again = replay(attempt, job)
    assert (again.complete, again.registered_version) == (True, "1"), again.message
    assert len(versions(mlflow_has, name)) == 1
    assert len(mlflow_has.run(job).outputs.model_outputs) == 1
    assert replay(attempt, job) == again


def test_an_older_server_gets_artifacts(
    proxy: MlflowProxy, make_job: Job, claim: Claim, built: Path, tmp_path: Path, mlflow_has: Any
) -> None:
    proxy.mood = lambda method, path: "404" if "logged-models" in path else "pass"
    name = f"digits-{time.time_ns()}"
    job = make_job(proxy.url, tracking={"registered_model": name})
    forwarder = Forwarder(claim(job), job, tmp_path / "journal.jsonl")
    forwarder.start()
    outcome = forwarder.close(JobState.SUCCEEDED, model_dir=built)
    assert (outcome.complete, outcome.registered_version) == (True, "1"), outcome.message
    paths = {artifact.path for artifact in mlflow_has.client.call("list_artifacts", outcome.run_id, "model")}
    assert "model/MLmodel" in paths
