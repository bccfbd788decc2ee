"""One Airflow on PostgreSQL: two schedulers, and two Celery workers with Redis between them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.building import DAGS, build_site, train_undisturbed
from faults.site import Site, Trained, wait_for

from stack.seaweed import Seaweed
from stack.service import start_all, stop_all
from support.airflow_stack import StackFactory
from support.guarding import guarded
from support.places import REPOSITORY
from support.postgres import Postgres
from support.redis_server import Redis
from support.unprivileged import open_folder

SCHEDULERS = WORKERS = 2


@pytest.fixture(scope="session")
def servers() -> Iterator[tuple[Postgres, Redis]]:
    """PostgreSQL and Redis on free ports, with passwords of their own."""
    with open_folder("database") as folder, guarded(folder):
        found = Postgres(folder), Redis(folder)
        start_all(found)
        yield found
        stop_all(found)


@pytest.fixture(scope="session")
def postgres(servers: tuple[Postgres, Redis]) -> Postgres:
    """Airflow's database."""
    return servers[0]


@pytest.fixture(scope="session")
def site(
    servers: tuple[Postgres, Redis],
    airflow_stack: StackFactory,
    seaweed: Seaweed,
    tmp_path_factory: pytest.TempPathFactory,
) -> Site:
    """The Airflow of all tests of this folder; trainings can be held at barriers."""
    postgres, redis = servers
    options = {
        "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": postgres.url("psycopg2"),
        "AIRFLOW__CELERY__BROKER_URL": redis.url,
        "AIRFLOW__CELERY__RESULT_BACKEND": f"db+{postgres.url('psycopg2')}",
        "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "20",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "45",  # nine processes start at once here
        "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
    }
    site = build_site(
        airflow_stack,
        seaweed,
        tmp_path_factory,
        dags=_dags(tmp_path_factory.mktemp("dags")),
        options=options,
        schedulers=SCHEDULERS,
        workers=WORKERS,
    )
    wait_for(lambda: schedulers(site) == SCHEDULERS, "both schedulers to report")
    return site


@pytest.fixture(scope="session")
def undisturbed(site: Site) -> Trained:
    """What a training ends with to which nothing happens."""
    return train_undisturbed(site)


def schedulers(site: Site) -> int:
    """Return how many schedulers are alive, by Airflow's own word."""
    found = site.stack.airflow.api.get("jobs", job_type="SchedulerJob", is_alive="true")
    return int(found["total_entries"])


def _dags(folder: Path) -> Path:
    """Return a folder with the DAGs of the fault tests, and the example, which shall run when a test says so."""
    for file in DAGS.glob("*.py"):
        shutil.copy(file, folder)
    example = REPOSITORY / "dags/mnist_retrain.py"
    text, found = re.subn(r"schedule=.*,\n", "schedule=None,\n", example.read_text())
    assert found == 1
    (folder / example.name).write_text(text)
    return folder
