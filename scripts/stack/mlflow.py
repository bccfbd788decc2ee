"""An MLflow server: SQLite for records, artifacts through its proxy, optionally with a password."""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from stack.ports import free_ports
from stack.service import Service


class Mlflow(Service):
    """A tracking server and model registry.

    :param artifacts: where artifacts go: ``s3://bucket/prefix`` or a folder; default: a folder beside the database.
    :param s3: environment for S3: AWS keys and MLFLOW_S3_ENDPOINT_URL.
    :param password: of the user ``admin``; without one the server asks for none.
    :param host: the one address it listens on.
    """

    name = "mlflow"
    start_timeout_s = 240
    username = "admin"

    def __init__(
        self,
        folder: Path,
        *,
        program: str,
        port: int | None = None,
        artifacts: str | None = None,
        s3: Mapping[str, str] | None = None,
        password: str | None = None,
        flask_secret: str | None = None,
        host: str = "127.0.0.1",
        relay_port: int | None = None,
    ) -> None:
        self.host = host
        self._relay_port = relay_port
        self.port = port or free_ports(1)[0]
        self.data = folder / "mlflow"
        self.artifacts = artifacts or str(self.data / "artifacts")
        self.password = password
        self._program = program
        super().__init__(folder, self._environment(dict(s3 or {}), flask_secret or os.urandom(16).hex()))

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{self.host}:{self.port}"

    @property
    def credentials(self) -> dict[str, str]:
        """User and password under the names that MLflow's client reads; empty without a password."""
        if self.password is None:
            return {}
        return {"MLFLOW_TRACKING_USERNAME": self.username, "MLFLOW_TRACKING_PASSWORD": self.password}

    def command(self) -> Sequence[str]:
        # A host name other than these two gets 403 "Invalid Host header".
        ports = [self.port, *([self._relay_port] if self._relay_port else [])]
        hosts = ",".join(f"{name}:{port}" for port in ports for name in (self.host, "localhost"))
        where = ["--host", self.host, "--port", str(self.port), "--workers", "1", "--allowed-hosts", hosts]
        stores = ["--backend-store-uri", f"sqlite:///{self.data}/mlflow.db", "--artifacts-destination", self.artifacts]
        auth = [] if self.password is None else ["--app-name", "basic-auth"]
        return [self._program, "server", *where, *stores, *auth]

    def prepare(self) -> None:
        super().prepare()
        self.data.mkdir(parents=True, exist_ok=True)
        settings = {
            "default_permission": "READ",
            "database_uri": f"sqlite:///{self.data}/users.db",
            "admin_username": self.username,
            "authorization_function": "mlflow.server.auth:authenticate_request_basic_auth",
            "auth_cache_ttl_seconds": "600",  # checking a password costs more CPU than the request itself
        }
        lines = ["[mlflow]", *(f"{key} = {value}" for key, value in settings.items())]
        (self.data / "auth.ini").write_text("\n".join(lines) + "\n")

    def ready(self) -> bool:
        """Return whether a search answers; ``/health`` would be fine with a broken database or host check."""
        return self.status("/api/2.0/mlflow/experiments/search", {"max_results": 1}) == 200

    def status(self, path: str, body: object | None = None) -> int:
        """Return the HTTP status of a request with the server's own password; 0 if nothing answers."""
        headers = {"Content-Type": "application/json"}
        if self.password is not None:
            pair = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
            headers["Authorization"] = f"Basic {pair}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)  # noqa: S310 - ours, on loopback
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def _environment(self, s3: dict[str, str], flask_secret: str) -> dict[str, str]:
        home = str(self.data)
        environment = {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", **s3}
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # else ten processes instead of two
        environment["MLFLOW_DISABLE_TELEMETRY"] = "true"
        environment["DO_NOT_TRACK"] = "true"
        environment["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
        environment["AWS_RESPONSE_CHECKSUM_VALIDATION"] = "when_required"
        environment["AWS_DEFAULT_REGION"] = "us-east-1"
        if self.password is not None:
            environment["MLFLOW_AUTH_CONFIG_PATH"] = str(self.data / "auth.ini")
            environment["MLFLOW_AUTH_ADMIN_PASSWORD"] = self.password
            environment["MLFLOW_FLASK_SERVER_SECRET_KEY"] = flask_secret
        return environment
