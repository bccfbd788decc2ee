"""One Airflow for all fault tests, with S3 and MLflow, and an undisturbed training to compare with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
from faults.site import Site, Trained

from mxdist.data.stage import stage
from mxdist.spec.cluster import Storage
from mxdist.store import Credentials
from stack.seaweed import Seaweed
from support.airflow_stack import StackFactory
from support.places import REPOSITORY

_OPTIONS = {
    "AIRFLOW__CORE__PARALLELISM": "8",
    # Airflow waits five minutes before it gives up a lost worker; these are shorter, and still bear a busy machine.
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "15",
}


@pytest.fixture(scope="session")
def site(airflow_stack: StackFactory, seaweed: Seaweed, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The Airflow of all fault tests; trainings can be held at barriers."""
    barriers = tmp_path_factory.mktemp("barriers")
    options = {**_OPTIONS, "MXDIST_BARRIERS": str(barriers)}
    stack = airflow_stack(dags=Path(__file__).parent / "dags", plugins=_plugins(), options=options)
    keys = Credentials(seaweed.access_key, seaweed.secret_key)
    staged = stage(
        _examples(tmp_path_factory.mktemp("examples")),
        f"s3://{seaweed.make_bucket()}/data",
        "squares",
        storage=Storage(endpoint_url=seaweed.endpoint_url),
        credentials=keys,
    )
    return Site(stack, barriers, dict(staged))


@pytest.fixture(scope="session")
def undisturbed(site: Site) -> Trained:
    """What a training ends with to which nothing happens."""
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
    """Return the plugins folder for an environment in which mxdist is not installed."""
    try:
        distribution("mxdist")
    except PackageNotFoundError:
        return REPOSITORY / "plugins"
    return None


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
