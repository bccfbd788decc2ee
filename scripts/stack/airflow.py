"""Airflow as its real processes, each of which can be started, killed and restarted alone; on SQLite, or another."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from stack.airflow_api import AirflowApi
from stack.ports import free_ports
from stack.processes import ServiceError, tail
from stack.service import Service, start_all, stop_all

COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")
# None of these serves its logs: that server would listen on all interfaces, and the API
# server reads the same folder.
_ARGUMENTS = {
    "scheduler": ["--skip-serve-logs"],
    "triggerer": ["--skip-serve-logs"],
    "worker": ["--skip-serve-logs", "--concurrency", "4", "--without-gossip", "--without-mingle"],
}
_MIGRATE_TIMEOUT_S = 600
_DATABASE_WAIT_S = 60  # for whoever writes to SQLite now; its own 5 s end in HTTP 500 on a busy machine

_SERVER_WAIT_S = 20
"""The same for the API server. One of its requests may wait for another that cannot go on meanwhile, since both are
served by one event loop: the sooner it gives up, the better, for its clients ask again."""


@dataclass(frozen=True)
class AirflowSecrets:
    """What an Airflow keeps to itself.

    :param password: of the user ``admin``.
    """

    password: str
    jwt_secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    secret_key: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    fernet_key: str = field(default_factory=lambda: base64.urlsafe_b64encode(os.urandom(32)).decode(), repr=False)


@dataclass(frozen=True)
class AirflowSettings:
    """How one Airflow is set up.

    :param program: the ``airflow`` command of the control environment.
    :param dags: the folder of DAG files.
    :param plugins: the plugins folder; None for an empty one, when mxdist is installed as a package. Never both.
    :param connections: by id, each as Airflow's JSON for connections.
    :param options: more environment, such as ``AIRFLOW__CORE__PARALLELISM``.
    :param schedulers: how many; more than one needs a database that can lock rows.
    :param workers: how many Celery workers, for the CeleryExecutor.
    """

    program: str
    dags: Path
    secrets: AirflowSecrets
    port: int | None = None
    plugins: Path | None = None
    connections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    schedulers: int = 1
    workers: int = 0

    @property
    def components(self) -> list[str]:
        """The processes by name, in the order of their start."""
        more = [f"scheduler-{number}" for number in range(2, self.schedulers + 1)]
        return [*COMPONENTS, *more, *(f"worker-{number}" for number in range(1, self.workers + 1))]


class Component(Service):
    """One of Airflow's processes."""

    start_timeout_s = 300
    grace_s = 30

    def __init__(self, name: str, stack: Airflow) -> None:
        self.name = name
        self.kind = re.sub(r"-\d+$", "", name)
        self._stack = stack
        self._since = 0.0
        self._said = 0
        super().__init__(stack.folder, _own_environment(self.kind, stack.environment))

    def command(self) -> Sequence[str]:
        port = ["--host", "127.0.0.1", "--port", str(self._stack.port)] if self.kind == "api-server" else []
        name = ["--celery-hostname", f"{self.name}@%h"] if self.kind == "worker" else []
        what = ["celery", "worker"] if self.kind == "worker" else [self.kind]
        return [self._stack.settings.program, *what, *_ARGUMENTS.get(self.kind, []), *name, *port]

    def prepare(self) -> None:
        super().prepare()
        self._since = time.time()
        self._said = self.log.stat().st_size if self.log.exists() else 0

    def ready(self) -> bool:
        """Return whether it has reported to the database after it was started: Airflow's own "healthy" looks back
        half a minute, to a process that may be dead. A Celery worker reports to its broker, and says so in its log."""
        if self.kind == "worker":
            return self._says(f"{self.name}@", "ready.")
        health = self._stack.api.health()
        if self.kind == "api-server" or not health:
            return bool(health)
        key = self.kind.replace("-", "_")
        beat = health.get(key, {}).get(f"latest_{key}_heartbeat")
        return beat is not None and datetime.fromisoformat(beat).timestamp() >= self._since

    def _says(self, *words: str) -> bool:
        with self.log.open("rb") as log:
            log.seek(self._said)
            return any(all(word.encode() in line for word in words) for line in log)


class Airflow:
    """All processes of one Airflow: ``airflow["scheduler"].kill()``.

    :param folder: AIRFLOW_HOME: database, logs, pid files.
    """

    def __init__(self, folder: Path, settings: AirflowSettings) -> None:
        self.folder = folder
        self.settings = settings
        self.port = settings.port or free_ports(1)[0]
        self.environment = self._environment()
        self.api = AirflowApi(self.url, "admin", settings.secrets.password)
        self._components = {name: Component(name, self) for name in settings.components}

    def __getitem__(self, name: str) -> Component:
        return self._components[name]

    @property
    def url(self) -> str:
        """Where the UI and the REST API answer."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def services(self) -> list[Component]:
        """The processes in the order of their start."""
        return list(self._components.values())

    def prepare(self) -> None:
        """Write the password file, and make or migrate the database unless this version already did."""
        (self.folder / "plugins").mkdir(parents=True, exist_ok=True)
        write_private(self.folder / "passwords.json", json.dumps({"admin": self.settings.secrets.password}))
        stamp = self.folder / "migrated"
        version = _installed_version(Path(self.settings.program))
        if stamp.exists() and stamp.read_text() == version:
            return
        log = self.folder / "migrate.log"
        with log.open("ab") as output:
            code = subprocess.call(
                [self.settings.program, "db", "migrate"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_MIGRATE_TIMEOUT_S,
            )
        if code:
            raise ServiceError(f"airflow db migrate ended with exit code {code}; the end of {log}:\n{tail(log)}")
        stamp.write_text(version)

    def start(self) -> None:
        """Start all processes and wait until each has reported."""
        self.prepare()
        start_all(self.services)

    def stop(self) -> None:
        """Stop all processes."""
        stop_all(self.services)

    def cli(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run an ``airflow`` command against this Airflow and return what it prints.

        :raises ServiceError: it failed.
        """
        command = [self.settings.program, *arguments]
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout_s)
        if answer.returncode:
            raise ServiceError(f"airflow {' '.join(arguments)} failed:\n{answer.stdout[-2000:]}{answer.stderr[-2000:]}")
        return answer.stdout

    def _environment(self) -> dict[str, str]:
        secrets, home = self.settings.secrets, self.folder
        environment = {
            "PATH": f"{Path(self.settings.program).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",  # the default forks 32 idle workers
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.settings.dags),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(self.settings.plugins or home / "plugins"),
            "AIRFLOW__CORE__FERNET_KEY": secrets.fernet_key,
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db?timeout={_DATABASE_WAIT_S}",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__SECRET_KEY": secrets.secret_key,
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.jwt_secret,
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "20",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "20",
            "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "PYTHONUNBUFFERED": "1",
        }
        for name, connection in self.settings.connections.items():
            environment[f"AIRFLOW_CONN_{name.upper()}"] = json.dumps(connection)
        return {**environment, **self.settings.options}


def _own_environment(kind: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of one kind of process, from that of all."""
    database = environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
    if kind != "api-server" or not database.startswith("sqlite:"):
        return environment
    waits = database.replace(f"timeout={_DATABASE_WAIT_S}", f"timeout={_SERVER_WAIT_S}")
    return {**environment, "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": waits}


def _installed_version(program: Path) -> str:
    """Return Airflow's version without the seconds that importing it takes."""
    found = program.parent.parent.glob("lib/python*/site-packages/apache_airflow_core-*.dist-info")
    return next((path.name for path in found), "unknown")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)
