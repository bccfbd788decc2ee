"""A whole Airflow with S3 and MLflow for system and fault tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mxdist.store import Credentials, Store, open_store
from stack.airflow import Airflow, AirflowSecrets, AirflowSettings
from stack.mlflow import Mlflow
from stack.processes import Process, end, of_jobs
from stack.seaweed import Seaweed
from support.guarding import guarded
from support.places import control_bin, node_python


@dataclass(frozen=True)
class Stack:
    """What a test of the whole needs: ``stack.airflow["triggerer"].kill()``, ``stack.airflow.api.trigger("my_dag")``.

    :param airflow: ``api``, ``cli()``, and the components by name: ``start``, ``stop``, ``kill``, ``restart``.
    :param runs_uri: the run store that the connection ``mxdist_default`` names.
    :param workdir: the scratch folders of all jobs of this Airflow.
    """

    airflow: Airflow
    seaweed: Seaweed
    mlflow: Mlflow
    runs_uri: str
    workdir: Path

    def runs(self) -> Store:
        """Return the run store."""
        keys = Credentials(self.seaweed.access_key, self.seaweed.secret_key)
        return open_store(self.runs_uri, endpoint_url=self.seaweed.endpoint_url, credentials=keys)

    def jobs(self) -> list[Process]:
        """Return the processes of all jobs: supervisors, ranks and whatever they started."""
        return of_jobs(self.workdir)

    def stop(self) -> None:
        """Stop Airflow, then its jobs."""
        self.airflow.stop()
        end(self.jobs, grace_s=5)


StackFactory = Callable[..., Stack]


@pytest.fixture(scope="session")
def airflow_stack(
    tmp_path_factory: pytest.TempPathFactory, seaweed: Seaweed, mlflow_session: Mlflow
) -> Iterator[StackFactory]:
    """Start an Airflow of four real processes: ``airflow_stack(dags=folder)``, ready when it returns.

    ``plugins`` is a plugins folder, for an environment in which mxdist is not installed, and ``program`` is that
    environment's Airflow; ``options`` is more of Airflow's environment; ``schedulers`` and ``workers`` (of Celery) are
    how many; ``mlflow`` is another server than that of the test run, ``s3_url`` and ``mlflow_url`` are relays in front
    of the two. Starting takes most of a minute: make one for a module. All end with the test run.
    """
    started: list[Stack] = []
    with guarded(tmp_path_factory.mktemp("airflow")) as root:

        def start(
            *,
            dags: Path,
            plugins: Path | None = None,
            program: Path | None = None,
            options: Mapping[str, str] | None = None,
            schedulers: int = 1,
            workers: int = 0,
            mlflow: Mlflow | None = None,
            s3_url: str | None = None,
            mlflow_url: str | None = None,
        ) -> Stack:
            folder = root / f"airflow{len(started)}"
            program = program or control_bin() / "airflow"
            more = {
                "program": str(program),
                "options": dict(options or {}),
                "schedulers": schedulers,
                "workers": workers,
            }
            mlflow = mlflow or mlflow_session
            urls = (s3_url or seaweed.endpoint_url, mlflow_url or mlflow.url)
            stack = _build(folder, seaweed, mlflow, urls, dags, plugins, more)
            started.append(stack)
            stack.airflow.start()
            return stack

        yield start
        for stack in started:
            stack.stop()


def _build(
    folder: Path,
    seaweed: Seaweed,
    mlflow: Mlflow,
    urls: tuple[str, str],
    dags: Path,
    plugins: Path | None,
    more: dict[str, Any],
) -> Stack:
    if not seaweed.alive():
        seaweed.start()
    bucket, workdir = seaweed.make_bucket(), folder / "jobs"
    runs_uri = f"s3://{bucket}/runs"
    extra = {
        "runs_uri": runs_uri,
        "data_uri": f"s3://{bucket}/data",
        "node_python": str(node_python()),
        "workdir": str(workdir),
        "aws_conn_id": "aws_default",
    }
    keys = {"login": seaweed.access_key, "password": seaweed.secret_key}
    place = {"endpoint_url": urls[0], "region_name": "us-east-1"}
    settings = AirflowSettings(
        dags=dags,
        secrets=AirflowSecrets("mxdist-test-password"),
        plugins=plugins,
        connections={
            "mxdist_default": {"conn_type": "mxdist", "extra": extra},
            "aws_default": {"conn_type": "aws", **keys, "extra": place},
            "mxdist_mlflow": {"conn_type": "mxdist_mlflow", "host": urls[1]},
        },
        **{**more, "options": {"AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False", **more["options"]}},
    )
    return Stack(Airflow(folder, settings), seaweed, mlflow, runs_uri, workdir)
