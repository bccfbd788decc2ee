"""The services of `make demo`: S3, MLflow and Airflow in one folder, the same ones from run to run."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from stack.airflow import Airflow, AirflowSecrets, AirflowSettings, write_private
from stack.mlflow import Mlflow
from stack.ports import free_ports, is_free, port_of
from stack.processes import PidFile, Process, ServiceError, end, family, of_jobs, supervisors
from stack.seaweed import PORTS, Seaweed, remove_sockets
from stack.service import Service

_CONFIGURED = {"airflow": "MXDIST_AIRFLOW_PORT", "mlflow": "MXDIST_MLFLOW_PORT", "s3.port": "MXDIST_S3_PORT"}
_JOB_GRACE_S = 30
_BUCKET = "mxdist"


@dataclass(frozen=True)
class Passwords:
    """Made once, kept in a file that only its owner can read."""

    s3_access_key: str = field(default_factory=lambda: f"mxdist-{secrets.token_hex(4)}")
    s3_secret_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    mlflow_user: str = Mlflow.username
    mlflow_password: str = field(default_factory=lambda: secrets.token_urlsafe(15), repr=False)
    mlflow_session_key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    airflow_user: str = "admin"
    airflow_password: str = field(default_factory=lambda: secrets.token_urlsafe(12), repr=False)
    airflow_jwt_secret: str = field(default_factory=lambda: AirflowSecrets("").jwt_secret, repr=False)
    airflow_secret_key: str = field(default_factory=lambda: AirflowSecrets("").secret_key, repr=False)
    airflow_fernet_key: str = field(default_factory=lambda: AirflowSecrets("").fernet_key, repr=False)

    @classmethod
    def keep(cls, path: Path) -> Passwords:
        """Return those of the file; make the file when there is none."""
        if not path.exists():
            write_private(path, json.dumps(vars(cls()), indent=2) + "\n")
        return cls(**json.loads(path.read_text()))


class LocalStack:
    """Everything that `make demo` starts.

    :param repository: the checkout, for its DAGs.
    :param home: its generated folder, with the two environments; state goes to ``home/state``.
    """

    def __init__(self, repository: Path, home: Path) -> None:
        self.repository = repository
        self.state = home / "state"
        self.workdir = self.state / "jobs"
        self.passwords_file = self.state / "passwords.json"
        self._control, self._node = home / "control/bin", home / "node/bin/python"
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.passwords = Passwords.keep(self.passwords_file)
        self._pick_ports()
        self.seaweed = self._seaweed()
        self.mlflow = self._mlflow()
        self.airflow = self._airflow()

    @property
    def services(self) -> list[Service]:
        """All services in the order of their start."""
        return [self.seaweed, self.mlflow, *self.airflow.services]

    @property
    def runs_uri(self) -> str:
        """The run store of all jobs."""
        return f"s3://{_BUCKET}/runs"

    def dead(self) -> list[Service]:
        """Return the services that do not run."""
        return [service for service in self.services if not service.alive()]

    def connections(self) -> dict[str, dict[str, Any]]:
        """Return the Airflow connections by which DAGs reach nodes, S3 and MLflow."""
        extra = {
            "runs_uri": self.runs_uri,
            "data_uri": f"s3://{_BUCKET}/data",
            "node_python": str(self._node),
            "workdir": str(self.workdir),
            "aws_conn_id": "aws_default",
        }
        keys = {"login": self.passwords.s3_access_key, "password": self.passwords.s3_secret_key}
        place = {"endpoint_url": self.seaweed.endpoint_url, "region_name": "us-east-1"}
        account = {"login": self.passwords.mlflow_user, "password": self.passwords.mlflow_password}
        return {
            "mxdist_default": {"conn_type": "mxdist", "extra": extra},
            "aws_default": {"conn_type": "aws", **keys, "extra": place},
            "mxdist_mlflow": {"conn_type": "mxdist_mlflow", "host": self.mlflow.url, **account},
        }

    def _pick_ports(self) -> None:
        """Choose ports: configured ones, else those of the last time, else free ones."""
        file = self.state / "ports.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        names = ["airflow", "mlflow", *PORTS]
        fresh = dict(zip(names, free_ports(len(names)), strict=True))
        running = {name for name in names if self._runs("seaweed" if name in PORTS else name)}
        self.ports = {name: self._port(name, known, fresh, name in running) for name in names}
        for name, other in combinations(names, 2):
            if self.ports[name] == self.ports[other]:
                raise ServiceError(f"Port {self.ports[name]} is given to {name} and to {other}; change one of them.")
        if self.ports != known:
            write_private(file, json.dumps(self.ports, indent=2) + "\n")

    def _port(self, name: str, known: Mapping[str, int], fresh: Mapping[str, int], running: bool) -> int:
        configured = os.environ.get(_CONFIGURED.get(name, ""))
        if configured:
            port = port_of(_CONFIGURED[name], configured)
            if not (running and port == known.get(name)) and not is_free(port):
                raise ServiceError(f"{_CONFIGURED[name]}={port}: another program listens on this port.")
            return port
        port = known.get(name, fresh[name])
        return port if running or is_free(port) else fresh[name]

    def _runs(self, name: str) -> bool:
        path = self.state / ("airflow/api-server.pid" if name == "airflow" else f"{name}.pid")
        process = PidFile(path).read()
        return process is not None and process.alive()

    def _seaweed(self) -> Seaweed:
        return Seaweed(
            self.state,
            access_key=self.passwords.s3_access_key,
            secret_key=self.passwords.s3_secret_key,
            weed=str(self._control / "weed"),
            buckets=[_BUCKET],
            ports={name: self.ports[name] for name in PORTS},
        )

    def _mlflow(self) -> Mlflow:
        return Mlflow(
            self.state,
            program=str(self._control / "mlflow"),
            port=self.ports["mlflow"],
            artifacts=f"s3://{_BUCKET}/mlflow",
            s3={**self.seaweed.credentials, "MLFLOW_S3_ENDPOINT_URL": self.seaweed.endpoint_url},
            password=self.passwords.mlflow_password,
            flask_secret=self.passwords.mlflow_session_key,
        )

    def _airflow_id(self) -> str:
        """Return what tells this Airflow from every other one, for as long as its folder lives."""
        secret = self.passwords.airflow_jwt_secret
        return f"demo-{hashlib.sha256(f'mxdist airflow id {secret}'.encode()).hexdigest()[:16]}"

    def _airflow(self) -> Airflow:
        kept = self.passwords
        keys = AirflowSecrets(
            kept.airflow_password, kept.airflow_jwt_secret, kept.airflow_secret_key, kept.airflow_fernet_key
        )
        options = {
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            # Runs start by hand here: else the weekly one of mnist_retrain would stand in the queue of every demo.
            "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "False",
            # The port may change; jobs of the last time are this Airflow's all the same.
            "MXDIST_AIRFLOW_ID": self._airflow_id(),
            # Processes that were started with older code are replaced.
            "MXDIST_REVISION": _digest(self.repository / "plugins", self._control.parent / "pyvenv.cfg"),
        }
        settings = AirflowSettings(
            program=str(self._control / "airflow"),
            dags=self.repository / "dags",
            secrets=keys,
            port=self.ports["airflow"],
            connections=self.connections(),
            options=options,
        )
        return Airflow(self.state / "airflow", settings)


def _digest(plugins: Path, venv: Path) -> str:
    digest = hashlib.sha256(f"{venv.stat().st_mtime_ns}".encode())
    for path in sorted(plugins.rglob("*.py")):
        digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def running(state: Path) -> list[Process]:
    """Return every process of a stack: services, what they started, and jobs."""
    known = [PidFile(path).read() for path in sorted(state.rglob("*.pid"))]
    return family([item for item in known if item is not None]) + of_jobs(state / "jobs")


def stop(state: Path) -> None:
    """End a stack, from its folder alone: it works for any state that a start or an upgrade left.

    Airflow goes first, so that nothing revives a job; then the jobs, which leave a checkpoint in S3; then the rest.
    """
    workdir = state / "jobs"
    _stop_pids(sorted((state / "airflow").glob("*.pid")), grace_s=40)
    asked = supervisors(workdir)
    end(lambda: of_jobs(workdir), grace_s=_JOB_GRACE_S if asked else 0, asked=asked)
    _stop_pids([state / "mlflow.pid"], grace_s=20)
    _stop_pids([state / "seaweed.pid"], grace_s=30)
    ports = state / "ports.json"
    remove_sockets(json.loads(ports.read_text()) if ports.exists() else {})


def _stop_pids(files: list[Path], *, grace_s: float) -> None:
    known = [PidFile(path).read() for path in files]
    leaders = [item for item in known if item is not None]
    alive = [item for item in leaders if item.alive()]
    end(lambda: family(leaders), grace_s=grace_s, asked=alive)
    for path in files:
        path.unlink(missing_ok=True)
