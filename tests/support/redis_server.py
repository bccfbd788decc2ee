"""A Redis server for Celery, on loopback, as a user without rights, with a password."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from stack.ports import free_ports
from stack.service import Service
from support.unprivileged import as_user, give

USER = "redis"
"""The user of the system who runs the server when root starts it."""


class Redis(Service):
    """One server that keeps nothing on disk.

    :param folder: open to all; the settings in it, with the password, are the server's own.
    """

    name = "redis"
    start_timeout_s = 60

    def __init__(self, folder: Path) -> None:
        self.port = free_ports(1)[0]
        self.password = secrets.token_urlsafe(24)
        self.home = folder / "redis"
        super().__init__(folder, {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "LANG": "C.UTF-8"})

    @property
    def url(self) -> str:
        """The broker's address, with its password."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def command(self) -> Sequence[str]:
        return as_user(USER, ["redis-server", self._settings])

    def prepare(self) -> None:
        super().prepare()
        self.home.mkdir(mode=0o700, exist_ok=True)
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "requirepass": self.password,
            "save": '""',
            "dir": str(self.home),
        }
        self._settings.touch(mode=0o600)
        self._settings.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        give(USER, self.home, self._settings)

    def ready(self) -> bool:
        """Return whether it answers to its password."""
        import redis

        try:
            with redis.Redis(port=self.port, password=self.password, socket_timeout=5) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    @property
    def _settings(self) -> Path:
        return self.home / "redis.conf"
