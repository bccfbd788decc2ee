"""A dataset that anything can learn in seconds, and a job that trains mxdist's own loop on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxdist.data.stage import stage
from mxdist.spec import TrainingJob, parse_job


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
