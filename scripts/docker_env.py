"""Write docker/.env: passwords and keys for docker/compose.yaml, random, readable by their owner only.

A file that is there stays as it is: PostgreSQL and SeaweedFS keep the passwords they were made with.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "docker/.env"
_S3, _MLFLOW = "http://seaweedfs:8333", "http://mlflow:5000"


def main() -> int:
    """Run it from the command line; an argument names another file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    try:
        print(f"{'Wrote' if write(path) else 'Kept'} {path}.")
    except OSError as error:
        print(f"Cannot write {path}: {error}", file=sys.stderr)
        return 1
    return 0


def write(path: Path) -> bool:
    """Write the file unless there is one; return whether it was written.

    :raises OSError: it cannot be written, or ssh-keygen is not there.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w") as file:
            file.writelines(f"{name}={_quoted(value)}\n" for name, value in values().items())
    except BaseException:
        path.unlink()
        raise
    return True


def values() -> dict[str, str]:
    """Return fresh values by the names that compose.yaml asks for."""
    postgres, redis, mlflow = (secrets.token_hex(24) for _ in range(3))
    access, secret = f"mxdist{secrets.token_hex(7)}", secrets.token_hex(24)
    private, public = _ssh_keys()
    database = f"postgresql+psycopg2://mxdist:{postgres}@postgres:5432"
    return {
        "POSTGRES_PASSWORD": postgres,
        "REDIS_PASSWORD": redis,
        "REDIS_CONF": f'requirepass {redis}\nsave ""\nappendonly no',
        "S3_ACCESS_KEY": access,
        "S3_SECRET_KEY": secret,
        "MLFLOW_PASSWORD": mlflow,
        "MLFLOW_SESSION_KEY": secrets.token_hex(32),
        "MLFLOW_DATABASE_URL": f"{database}/mlflow",
        "AIRFLOW_DATABASE_URL": f"{database}/airflow",
        "AIRFLOW_RESULT_BACKEND": f"db+{database}/airflow",
        "AIRFLOW_BROKER_URL": f"redis://:{redis}@redis:6379/0",
        "AIRFLOW_FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "AIRFLOW_JWT_SECRET": secrets.token_hex(32),
        "AIRFLOW_SECRET_KEY": secrets.token_hex(32),
        "AIRFLOW_PASSWORDS": json.dumps({"admin": secrets.token_urlsafe(15)}),
        "AIRFLOW_CONNECTIONS": json.dumps(_connections(access, secret, mlflow)),
        "SSH_PRIVATE_KEY": private,
        "SSH_PUBLIC_KEY": public,
    }


def _connections(access: str, secret: str, mlflow: str) -> dict[str, dict[str, Any]]:
    """Return the Airflow connections by which DAGs reach the nodes, S3 and MLflow."""
    extra = {
        "runs_uri": "s3://mxdist/runs",
        "data_uri": "s3://mxdist/data",
        "node_python": "/opt/node/bin/python",
        "workdir": "/var/lib/mxdist/jobs",
        "aws_conn_id": "aws_default",
    }
    place = {"endpoint_url": _S3, "region_name": "us-east-1"}
    account = {"login": "admin", "password": mlflow, "extra": {"ui_url": "http://localhost:5000"}}
    return {
        "mxdist_default": {"conn_type": "mxdist", "extra": extra},
        "aws_default": {"conn_type": "aws", "login": access, "password": secret, "extra": place},
        "mxdist_mlflow": {"conn_type": "mxdist_mlflow", "host": _MLFLOW, **account},
    }


def _ssh_keys() -> tuple[str, str]:
    """Return a new key pair for logging in to the nodes: the private and the public half."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "mxdist", "-f", str(key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        return key.read_text(), key.with_suffix(".pub").read_text().strip()


def _quoted(value: str) -> str:
    r"""Return the value as compose reads it: as it stands in single quotes, or with ``\n`` in double ones."""
    if "\n" not in value:
        return f"'{value}'"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", "\\n")
    return f'"{escaped}"'


if __name__ == "__main__":
    sys.exit(main())
