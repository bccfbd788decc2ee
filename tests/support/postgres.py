"""A PostgreSQL server for Airflow's metadata, on loopback, as a user without rights, with a password."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from stack.ports import free_ports
from stack.processes import ServiceError
from stack.service import Service
from support.unprivileged import as_user, give

USER = "postgres"
"""The user of the system who runs the server when root starts it, for it refuses root; also the database's own."""

_PROGRAMS = Path("/usr/lib/postgresql")  # where Debian keeps them, by version


class Postgres(Service):
    """One server with the database ``airflow``.

    :param folder: open to all; the data in it are the server's own.
    """

    name = "postgres"
    start_timeout_s = 120
    database = "airflow"

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)[0]
        self.password = secrets.token_urlsafe(24)
        self.home = folder / "postgresql"
        self._programs = _newest()
        home = str(self.home)
        super().__init__(folder, {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "TZ": "UTC"})

    def url(self, driver: str) -> str:
        """Return the database's address for SQLAlchemy, with its password."""
        return f"postgresql+{driver}://{USER}:{self.password}@127.0.0.1:{self.port}/{self.database}"

    def command(self) -> Sequence[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "fsync": "off",  # the machine does not lose its power within a test
            "max_connections": "200",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return as_user(USER, [f"{self._programs}/postgres", "-D", f"{self.home}/data", *options])

    def prepare(self) -> None:
        super().prepare()
        if self.home.exists():
            return
        self.home.mkdir(mode=0o700)
        password = self.home / "password"
        password.touch(mode=0o600)
        password.write_text(self.password)
        give(USER, self.home, password)
        make = [str(self._programs / "initdb"), "-D", str(self.home / "data"), "-U", USER, "--no-sync"]
        self._run([*make, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8", f"--pwfile={password}"])
        password.unlink()

    def ready(self) -> bool:
        """Return whether the database answers; it is made when it is not there."""
        import psycopg2

        try:
            connection = psycopg2.connect(self._address("postgres"))
        except psycopg2.OperationalError:
            return False
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("select 1 from pg_database where datname = %s", (self.database,))
            if cursor.fetchone() is None:
                cursor.execute(f"create database {self.database}")
        connection.close()
        return True

    def ask(self, question: str) -> list[tuple[object, ...]]:
        """Return what a query finds."""
        import psycopg2

        connection = psycopg2.connect(self._address(self.database))
        with connection.cursor() as cursor:
            cursor.execute(question)
            found = list(cursor.fetchall())
        connection.close()
        return found

    def _address(self, database: str) -> str:
        return f"host=127.0.0.1 port={self.port} user={USER} password={self.password} dbname={database}"

    def _run(self, command: list[str | Path]) -> None:
        done = subprocess.run(
            as_user(USER, command), env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise ServiceError(f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _newest() -> Path:
    """Return the folder of the newest server that is installed."""
    if found := shutil.which("postgres"):
        return Path(found).parent
    found_here = [path for path in _PROGRAMS.glob("*/bin") if os.access(path / "postgres", os.X_OK)]
    if not found_here:
        raise ServiceError("there is no PostgreSQL server on this machine (Debian: apt-get install postgresql).")
    return max(found_here, key=lambda path: int(path.parent.name))
