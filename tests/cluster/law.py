"""What a training on nodes must agree with: one process, one device, plain Gluon (``parallel/reference.py``)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxdist.data.stage import stage
from mxdist.spec import digest_of
from mxdist.store import Attempt, Result, Store
from mxdist.tracking import models
from support.places import REPOSITORY, node_python

BOUND = 1e-9
"""In float64, for every weight and every loss, after 20 steps."""

FLOAT32_BOUND = 1e-4
"""In float32, which parameter servers compute in."""

_REFERENCE = REPOSITORY / "tests/parallel/reference.py"
_ROWS = 73  # the last batch has one row: one of two ranks then has none
_ARGUMENTS = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}
_CASE = {
    "seed": 3, "batch_size": 8, "epochs": 2, "network": "lenet", "optimizer": "sgd", "arguments": _ARGUMENTS,
    "learning_rate": 0.1, "warmup_steps": 5, "decay": "cosine", "clip_norm": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Law:
    """The reference's answer, and the fields of a job that should give the same.

    :param fields: all but ``cluster`` and ``parallelism``.
    """

    fields: dict[str, Any]
    weights: dict[str, np.ndarray]
    losses: np.ndarray

    def off(self, attempt: Attempt, result: Result) -> float:
        """Return the largest difference of a weight or a loss to the reference's."""
        with tempfile.TemporaryDirectory() as folder:
            models.fetch(attempt.store.child("model"), Path(folder))
            (path,) = Path(folder).rglob("params.npz")
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        assert found.keys() == self.weights.keys()
        records = [record for _, chunk in attempt.journal.read() for record in chunk["records"]]
        losses = np.array([record["value"] for record in records if record["key"] == "loss"])
        assert len(losses) == len(self.losses) == result.steps == 20
        worst = max(float(np.abs(found[name] - self.weights[name]).max()) for name in found)
        return max(worst, float(np.abs(losses - self.losses).max()))


def make_law(root: Path, store: Store, **storage: Any) -> Law:
    """Run the reference here; put its data and its initial weights into ``store``, which the nodes reach.

    :param storage: how ``stage`` reaches that store.
    """
    chance = np.random.RandomState(0)
    x = chance.randint(0, 256, (_ROWS, 1, 16, 16)).astype(np.uint8)
    y = np.arange(_ROWS, dtype=np.int64) % 3
    case = {**_CASE, **{name: str(root / f"{name}.npz") for name in ("data", "initial", "trained")}}
    np.savez(case["data"], x=x, y=y)
    (root / "case.json").write_text(json.dumps(case))
    subprocess.run([node_python(), "-I", _REFERENCE, root / "case.json"], check=True, timeout=300)
    with np.load(case["trained"]) as trained:
        weights = {name: trained[name] for name in trained.files if name != "norms"}
    split = root / "source/train"
    split.mkdir(parents=True)
    np.save(split / "x.npy", x)
    np.save(split / "y.npy", y)
    staged = stage(str(root / "source"), f"{store.uri}/data", "law", **storage)
    fields = {
        "name": "law",
        "model": {"name": "lenet", "params": {"channels": 4, "hidden": 16}},
        "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]},
        "init": {"model_uri": _initial(root, store)},
        "dtype": "float64",
        "seed": case["seed"],
        "batch_size": case["batch_size"],
        "epochs": case["epochs"],
        "optimizer": {
            "name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "clip_norm": 1.0,
            "schedule": {"warmup_steps": 5, "decay": "cosine"},
        },
    }  # fmt: skip
    return Law(fields, weights, weights.pop("losses"))


def _initial(root: Path, store: Store) -> str:
    """Publish the reference's initial weights as a model that a job can start from."""
    folder = root / "initial-model"
    folder.mkdir()
    (folder / "params.npz").write_bytes((root / "initial.npz").read_bytes())
    labels = [0, 1, 2]
    (folder / "model.json").write_text(json.dumps({"label_digest": digest_of(labels), "labels": labels}))
    place = store.child("published")
    models.publish(folder, place)
    return f"{place.uri}/model"
