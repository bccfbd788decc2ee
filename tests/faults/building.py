"""What the fault tests train on, and an Airflow for them."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.site import Site, Trained, wait_for

from mxdist.data.stage import stage
from mxdist.spec.cluster import Storage
from mxdist.store import Credentials
from stack.seaweed import Seaweed
from support.airflow_stack import Stack, StackFactory
from support.places import REPOSITORY, control_bin

DAGS = Path(__file__).parent / "dags"

_OPTIONS = {
    "AIRFLOW__CORE__PARALLELISM": "8",
    # Airflow waits five minutes before it gives up a lost worker; these are shorter, and still bear a busy machine.
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "15",
}


def build_site(
    airflow_stack: StackFactory,
    seaweed: Seaweed,
    folders: pytest.TempPathFactory,
    *,
    dags: Path = DAGS,
    options: dict[str, str] | None = None,
    **more: Any,
) -> Site:
    """Start an Airflow whose trainings can be held at barriers, and stage what they learn from."""
    barriers = folders.mktemp("barriers")
    settings = {**_OPTIONS, "MXDIST_BARRIERS": str(barriers), **(options or {})}
    stack = airflow_stack(dags=dags, plugins=_plugins(), options=settings, **more)
    staged = stage(
        _examples(folders.mktemp("examples")),
        f"s3://{seaweed.make_bucket()}/data",
        "squares",
        storage=Storage(endpoint_url=seaweed.endpoint_url),
        credentials=Credentials(seaweed.access_key, seaweed.secret_key),
    )
    for file in dags.glob("*.py"):
        wait_for(partial(_is_read, stack, file.name), f"Airflow to read {file.name}")
    return Site(stack, barriers, dict(staged))


def _is_read(stack: Stack, file: str) -> bool:
    return any(dag["relative_fileloc"] == file for dag in stack.airflow.api.get("dags")["dags"])


def train_undisturbed(site: Site) -> Trained:
    """Return what a training ends with to which nothing happens."""
    run = site.train("undisturbed")
    assert run.ended()["state"] == "success"
    (record,) = run.records()
    digest = run.result().model_digest
    assert record.status == "FINISHED"
    assert digest
    losses = run.losses()
    assert [step for step, _ in losses] == list(range(1, 17)), "64 examples in batches of 16, four times"
    return Trained(digest, losses)


def _plugins() -> Path | None:
    """Return the plugins folder for an environment in which mxdist is not installed.

    That environment itself is asked, from outside: the checkout may hold an egg-info.
    """
    command = [str(control_bin() / "python"), "-I", "-c", "import mxdist"]
    installed = subprocess.run(command, cwd="/", capture_output=True).returncode == 0
    return None if installed else REPOSITORY / "plugins"


def _examples(folder: Path) -> Path:
    """Write 64 noisy squares of two kinds."""
    noise = np.random.default_rng(7)
    y = np.arange(64) % 2
    x = noise.integers(0, 60, size=(64, 1, 8, 8))
    x[y == 1, :, 2:6, 2:6] += 120
    (folder / "train").mkdir()
    np.save(folder / "train/x.npy", x.astype(np.uint8))
    np.save(folder / "train/y.npy", y.astype(np.int64))
    return folder
