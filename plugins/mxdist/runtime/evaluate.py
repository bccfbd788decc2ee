"""Scores: of a network while it trains, and of exported models on a split that nobody trained on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from mxdist.data.arrays import no_classes
from mxdist.data.split import load_split
from mxdist.errors import DataError, NotFound, Problem, SpecError
from mxdist.runtime import network
from mxdist.runtime.batches import Batch, Examples, Feed
from mxdist.runtime.parallel.base import Group
from mxdist.runtime.pyfunc_model import Predictor
from mxdist.runtime.recipe import Metric
from mxdist.runtime.worker import Worker
from mxdist.spec import EvaluationJob
from mxdist.store import open_store
from mxdist.tracking import models

_ROWS_A_RANK = 256
_LEAST_PROBABILITY = 1e-12  # a class that a model does not know; its logarithm must stay finite


def score(
    forward: network.Forward,
    loss: mx.gluon.HybridBlock,
    metrics: Mapping[str, Metric],
    examples: Examples,
    *,
    group: Group,
    device: mx.Context,
    dtype: str,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return loss and metrics over all examples: sums and counts of all ranks in float64, then divided."""
    sums = {name: (0.0, 0.0) for name in ("loss", *metrics)}
    feed = Feed(examples, _ROWS_A_RANK * group.size, rank=group.rank, size=group.size, device=device, dtype=dtype)
    for batch in feed.batches(np.arange(len(examples))):
        for name, values in _of_batch(forward, loss, metrics, batch).items():
            total, count = sums[name]
            sums[name] = (total + float(values.sum()), count + len(values))
        beat()
    return group.means(sums)


def _of_batch(
    forward: network.Forward, loss: mx.gluon.HybridBlock, metrics: Mapping[str, Metric], batch: Batch
) -> dict[str, NDArray[np.float64]]:
    if batch.x is None:
        return {}
    output = forward(batch.x)
    values = {"loss": loss(output, batch.y)}
    values |= {name: metric(mx.nd, output, batch.y) for name, metric in metrics.items()}
    return {name: value.asnumpy().astype(np.float64).reshape(batch.rows) for name, value in values.items()}


def run(job: EvaluationJob, worker: Worker) -> dict[str, Any]:
    """Score every model of the job on the same examples; return the result for the supervisor."""
    from mxdist.runtime.setup import fetch_dataset

    folder = fetch_dataset(job.dataset, job, worker)
    if not (folder / job.split).is_dir():
        raise DataError(f"the dataset has no split {job.split!r}.")
    x, y = load_split(folder, job.split, job.dataset.labels)
    if problem := no_classes(y, "float64", outputs=None, learnt=job.dataset.labels is None):
        raise DataError(f"y of the {job.split} split {problem}.", hint="Set dataset.labels.")
    labels = job.dataset.labels or tuple(range(int(y.max()) + 1))
    scores: dict[str, dict[str, Any]] = {}

    def beat() -> None:
        worker.beat(len(scores))

    for role, uri in sorted(job.models.items()):
        scores[role] = _score_model(role, uri, job, x, y, labels, beat)
        worker.log_metrics(_finite(role, scores[role]), step=0)
        worker.progress(epoch=0, epochs=0, step=len(scores), steps=len(job.models))
    metrics = {name: value for role, found in scores.items() for name, value in _finite(role, found).items()}
    outputs = {"scores": scores, "dataset_version": job.dataset.version, "split": job.split, "labels": list(labels)}
    return {
        "state": "done", "metrics": metrics, "model_dir": None, "outputs": outputs, "steps": len(scores),
        "samples_per_s": None,
    }  # fmt: skip


def _finite(role: str, found: dict[str, Any]) -> dict[str, float]:
    return {f"{role}_{name}": found[name] for name in ("accuracy", "loss") if found[name] is not None}


def _score_model(
    role: str,
    uri: str,
    job: EvaluationJob,
    x: NDArray[Any],
    y: NDArray[Any],
    labels: tuple[int, ...],
    beat: Callable[[], None],
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mxdist-model-") as scratch:
        folder = fetch_model(role, uri, job, Path(scratch, "model"))
        digest = models.digest(folder)
        predictor = Predictor(folder)
    parts = []
    for start in range(0, len(x), job.batch_size):
        parts.append(predictor.predict(x[start : start + job.batch_size]).astype(np.float64))
        beat()
    theirs = predictor.about.get("labels") or list(range(predictor.about["classes"]))
    found = score_probabilities(np.concatenate(parts), theirs, y, labels)
    return {"model_uri": uri, "model_digest": digest, "model_labels": list(theirs), **found}


def score_probabilities(
    probabilities: NDArray[np.float64], theirs: list[int], y: NDArray[Any], labels: tuple[int, ...]
) -> dict[str, Any]:
    """Return accuracy, loss and counts per label; accuracy and loss are None if a probability is not finite.

    :param theirs: the label that each of the model's classes stands for; it may know others than the data has.
    :param y: classes of the examples, by position in ``labels``.
    """
    truth = np.asarray(labels)[y]
    predicted = np.asarray(theirs)[probabilities.argmax(axis=1)]
    column = {label: index for index, label in enumerate(theirs)}
    known = np.array([column.get(int(label), -1) for label in truth])
    chosen = np.where(known >= 0, probabilities[np.arange(len(y)), np.maximum(known, 0)], 0.0)
    right = predicted == truth
    per_label = {
        str(label): {
            "count": int((truth == label).sum()), "right": int(right[truth == label].sum()),
            "predicted": int((predicted == label).sum()),
        }
        for label in labels
    }  # fmt: skip
    sound = bool(np.isfinite(probabilities).all())
    return {
        "accuracy": float(right.sum() / len(y)) if sound else None,
        "loss": float(-np.log(np.clip(chosen, _LEAST_PROBABILITY, None)).sum() / len(y)) if sound else None,
        "count": len(y),
        "per_label": per_label,
    }


def fetch_model(role: str, uri: str, job: EvaluationJob, out: Path) -> Path:
    """Return the exported model at ``uri``: a folder of a run store (verified), or a model that MLflow knows.

    :raises SpecError: there is none.
    """
    if uri.startswith(("models:/", "runs:/")):
        return _from_mlflow(role, uri, job, out)
    store = open_store(uri, endpoint_url=job.storage.endpoint_url, region=job.storage.region)
    try:
        return models.exported(models.fetch(store, out))
    except NotFound as error:
        problem = f"there is no model at {uri}: {error.message}"
        raise SpecError("The job", [Problem(f"models.{role}", problem)]) from None


def _from_mlflow(role: str, uri: str, job: EvaluationJob, out: Path) -> Path:
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    if not job.tracking.uri:
        raise SpecError("The job", [Problem("tracking.uri", f"is required to find {uri}")])
    out.mkdir(parents=True)
    try:
        return models.exported(Path(download_artifacts(uri, dst_path=str(out), tracking_uri=job.tracking.uri)))
    except MlflowException as error:
        raise SpecError("The job", [Problem(f"models.{role}", f"MLflow has no {uri}: {error.message}")]) from None
