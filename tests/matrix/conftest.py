"""The scene of all trials; ``make faults SEED=7 TRIALS=20`` makes the trials of seeds 7 to 26."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from faults.building import build_site, train_undisturbed
from matrix.cells import Victim
from matrix.report import read, table
from matrix.scene import Manager, Scene

from stack.mlflow import Mlflow
from stack.ports import free_ports
from stack.seaweed import Seaweed
from stack.service import start_all, stop_all
from support.airflow_stack import StackFactory
from support.guarding import guarded
from support.places import REPOSITORY, control_bin
from support.postgres import Postgres
from support.relay import Relay
from support.unprivileged import open_folder

REPORT = REPOSITORY / ".mxdist/faults/trials.jsonl"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What a run of trials may choose."""
    parser.addoption("--seed", type=int, default=0, help="of the first trial")
    parser.addoption("--trials", type=int, default=0, help="how many, with seeds in a row")
    parser.addoption("--report", type=Path, default=REPORT, help="the file that grows by a line for each trial")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each trial."""
    if "seed" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("seed"), metafunc.config.getoption("trials")
        metafunc.parametrize("seed", range(first, first + count))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of all trials so far."""
    terminalreporter.section("trials so far")
    terminalreporter.write_line(table(read(config.getoption("report"))))


@pytest.fixture(scope="session")
def scene(airflow_stack: StackFactory, seaweed: Seaweed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A whole Airflow on PostgreSQL, whose connections to S3 and MLflow go through relays."""
    with (
        open_folder("matrix") as folder,
        guarded(folder),
        Relay(urlsplit(seaweed.endpoint_url).port or 0) as s3,
        Relay(free_ports(1)[0]) as before_mlflow,
    ):
        postgres = Postgres(folder)
        mlflow = Mlflow(
            folder / "mlflow",
            program=str(control_bin() / "mlflow"),
            port=before_mlflow.upstream,
            relay_port=before_mlflow.port,
        )
        start_all([postgres, mlflow])
        options = {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": postgres.url("psycopg2"),
            "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
        }
        site = build_site(
            airflow_stack,
            seaweed,
            tmp_path_factory,
            options=options,
            mlflow=mlflow,
            s3_url=s3.url,
            mlflow_url=before_mlflow.url,
        )
        manager = Manager([postgres, seaweed, mlflow, *site.stack.airflow.services])
        relays = {Victim.S3: s3, Victim.MLFLOW: before_mlflow}
        with manager.running():
            yield Scene(site, postgres, relays, train_undisturbed(site), manager)
        site.stack.stop()
        stop_all([postgres, mlflow])
