"""The trained model as MLflow knows it: a pyfunc folder, logged once, registered once.

The folder holds the exported model (``data/model``), one self-contained file of code (``code/``), signature, input
example and requirements, so it loads and predicts wherever MXNet and MLflow are, without mxdist.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mxdist.data.manifest import load_manifest
from mxdist.errors import MxdistError, StoreError, TrackingError
from mxdist.spec import EvaluationJob, TrainingJob, digest_of
from mxdist.store import Attempt, Claim, Store
from mxdist.tracking.client import UPLOAD_TIMEOUT_S, Client, bounded, code_of, load_mlflow

_log = logging.getLogger(__name__)

CODE = Path(__file__).parents[1] / "runtime" / "pyfunc_model.py"
"""What turns the exported files into a predictor; it travels with the model."""

MODEL = "model"
MANIFEST = "manifest.json"


def build(model_dir: Path, out: Path, *, job: TrainingJob | EvaluationJob, claim: Claim, code: Path = CODE) -> Path:
    """Make the MLflow model folder ``out`` from an exported model; return ``out``.

    :param model_dir: what training exported: ``model.json``, ``symbol.json``, ``params.npz``, ``input_example.npy``.
    :param code: a file that defines ``_load_pyfunc(path)`` and imports nothing of mxdist.
    :raises TrackingError: the exported model is not whole.
    """
    try:
        about = json.loads((model_dir / "model.json").read_text())
        _save(model_dir, about, out, code, _metadata(job, claim, digest(model_dir)))
    except TrackingError:
        raise
    except Exception as error:  # MLflow, numpy and the disk each have errors of their own
        raise TrackingError(
            f"{model_dir} is no exported model that MLflow can keep: {error}", retryable=False
        ) from error
    for cache in list(out.rglob("__pycache__")):
        shutil.rmtree(cache)
    return out


def digest(folder: Path) -> str:
    """Return the digest of a model: of the exported files alone, so the same weights have the same one.

    :param folder: an exported model, or an MLflow model folder that holds one.
    """
    files = _listing(exported(folder))
    return digest_of([[file["path"], file["size"], file["sha256"]] for file in files])


def exported(folder: Path) -> Path:
    """Return the exported model within an MLflow model folder; an exported model is itself."""
    inside = folder / "data" / MODEL
    return inside if inside.is_dir() else folder


def publish(folder: Path, store: Store) -> str:
    """Copy a model folder to ``model/`` of an attempt's store, its manifest last; return the model's digest."""
    files = _listing(folder)
    target = store.child(MODEL)
    for file in files:
        target.upload(file["path"], folder / file["path"])
    found = digest(folder)
    target.write_json(MANIFEST, {"format": 1, "digest": found, "files": files})
    return found


def fetch(store: Store, out: Path) -> Path:
    """Copy a published model into ``out`` and verify every file; return ``out``.

    :param store: the model's own prefix, ``<attempt>/model``.
    :raises NotFound: there is no complete model.
    :raises StoreError: a file is not what the manifest says.
    """
    for file in store.read_json(MANIFEST)["files"]:
        path = out / file["path"]
        if not path.resolve().is_relative_to(out.resolve()):
            raise StoreError(f"{store.uri}/{MANIFEST} names a file outside of it: {file['path']!r}", retryable=False)
        store.download(file["path"], path)
        if _sha256(path) != file["sha256"]:
            raise StoreError(f"{store.uri}/{file['path']} is not what its manifest says", retryable=False)
    return out


def log(run_id: str, folder: Path, *, client: Client, tags: Mapping[str, str] | None = None) -> str:
    """Log a model folder to a run, once; return the source that ``register`` takes.

    A server that knows logged models gets one; an older one gets the files as artifacts of the run.
    """
    experiment_id = client.call("get_run", run_id).info.experiment_id
    marks = {"mxdist.model_digest": digest(folder), **(tags or {})}
    try:
        model = _logged(client, experiment_id, run_id, marks) or client.call(
            "create_logged_model", experiment_id, name=MODEL, source_run_id=run_id, tags=marks, model_type="mxnet"
        )
    except TrackingError as error:
        if code_of(error) not in {"ENDPOINT_NOT_FOUND", "NOT_FOUND"}:
            raise
        client.call("log_artifacts", run_id, str(folder), MODEL, timeout_s=UPLOAD_TIMEOUT_S)
        return f"{client.call('get_run', run_id).info.artifact_uri}/{MODEL}"
    if str(model.status) != "READY":
        client.call("log_model_artifacts", model.model_id, str(folder), timeout_s=UPLOAD_TIMEOUT_S)
        client.call("finalize_logged_model", model.model_id, "READY")
    _name_output(client, run_id, model.model_id)
    return f"models:/{model.model_id}"


def register(name: str, run_id: str, source: str, *, client: Client, tags: Mapping[str, str]) -> str:
    """Register a logged model as a version of ``name``, once; return the version.

    :param source: what ``log`` returned.
    """
    for version in client.call("search_model_versions", f"run_id = '{run_id}'"):
        if version.name == name:
            return str(version.version)
    try:
        client.call("create_registered_model", name)
    except TrackingError as error:
        if code_of(error) != "RESOURCE_ALREADY_EXISTS":
            raise
    model_id = source.removeprefix("models:/") if source.startswith("models:/") else None
    made = client.call(
        "create_model_version", name, source, run_id=run_id, tags=dict(tags), await_creation_for=0, model_id=model_id
    )
    return str(made.version)


def version_tags(attempt: Attempt, job: TrainingJob | EvaluationJob, model_digest: str) -> dict[str, str]:
    """Return the tags of a model version: what it was made from, so that the gate and a reader can tell."""
    tags = {"mxdist.job_key": attempt.claim.job_key, "mxdist.training_id": attempt.claim.training_id}
    tags |= {"mxdist.model_uri": f"{attempt.store.uri}/{MODEL}", "mxdist.model_digest": model_digest}
    if job.dataset is not None:
        tags |= {"mxdist.dataset_version": job.dataset.version, "mxdist.dataset_as_of": dataset_as_of(job)}
    if isinstance(job, TrainingJob) and job.init is not None:
        tags["mxdist.parent_model"] = job.init.model_uri
    return {key: value for key, value in tags.items() if value}


def dataset_as_of(job: TrainingJob | EvaluationJob) -> str:
    """Return the latest date that the job's dataset was staged for; '' when that cannot be read."""
    if job.dataset is None:
        return ""
    try:
        dataset, manifest = load_manifest(job.dataset.manifest_uri, job.dataset.version, storage=job.storage)
        return dataset.as_of(manifest)
    except MxdistError as error:
        _log.warning("cannot read %s: %s", job.dataset.manifest_uri, error)
        return ""


def _save(model_dir: Path, about: Mapping[str, Any], out: Path, code: Path, metadata: Mapping[str, str]) -> None:
    load_mlflow()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder, bounded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, about itself
        from mlflow import pyfunc

        pyfunc.save_model(
            str(out),
            loader_module=code.stem,
            data_path=str(shutil.copytree(model_dir, Path(folder, MODEL))),
            code_paths=[str(code)],
            pip_requirements=_requirements(about),
            metadata=dict(metadata),
            **_example(model_dir, about),
        )


def _logged(client: Client, experiment_id: str, run_id: str, marks: Mapping[str, str]) -> Any | None:
    """Return the model that an earlier try has begun to log for this run."""
    wanted = f"source_run_id = '{run_id}'"
    for model in client.call("search_logged_models", [experiment_id], filter_string=wanted):
        if model.tags.get("mxdist.model_digest") == marks["mxdist.model_digest"]:
            return model
    return None


def _name_output(client: Client, run_id: str, model_id: str) -> None:
    from mlflow.entities import LoggedModelOutput

    outputs = client.call("get_run", run_id).outputs
    if model_id not in {one.model_id for one in (outputs.model_outputs if outputs else ())}:
        client.call("log_outputs", run_id, [LoggedModelOutput(model_id, 0)])


def _example(model_dir: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    example = np.load(model_dir / "input_example.npy", allow_pickle=False)
    classes = about["classes"] if isinstance(about["classes"], int) else len(about["classes"])
    scores = np.dtype(about.get("dtype", "float32"))
    signature = ModelSignature(
        inputs=Schema([TensorSpec(example.dtype, (-1, *example.shape[1:]))]),
        outputs=Schema([TensorSpec(scores, (-1, classes))]),
    )
    return {"signature": signature, "input_example": example}


def _requirements(about: Mapping[str, Any]) -> list[str]:
    import mlflow

    versions = about.get("framework") or {}
    mxnet = versions.get("mxnet", "1.9.1") if isinstance(versions, Mapping) else "1.9.1"
    return [f"mxnet=={mxnet}", "numpy>=1.21,<1.24", "pandas>=1.5,<2.1", f"mlflow-skinny=={mlflow.__version__}"]


def _metadata(job: TrainingJob | EvaluationJob, claim: Claim, model_digest: str) -> dict[str, str]:
    known = {
        "mxdist.job_key": claim.job_key,
        "mxdist.training_id": claim.training_id,
        "mxdist.model_digest": model_digest,
    }
    return known | ({"mxdist.dataset_version": job.dataset.version} if job.dataset else {})


def _listing(folder: Path) -> list[dict[str, Any]]:
    return [
        {"path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "sha256": _sha256(path)}
        for path in _files(folder)
    ]


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
