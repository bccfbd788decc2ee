"""SeaweedFS as S3: one process, one key pair, one folder."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stack.ports import free_ports
from stack.service import Service

# Every port that `weed mini` opens. Those not given here would be 10000 above another, where anybody may listen.
PORTS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
    "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
)  # fmt: skip
_SOCKETS = ("master-grpc", "volume-grpc", "filer-grpc", "filer", "s3-grpc", "s3", "admin-grpc")

# How a Go program dies: a panic, or a fatal line of its log. The stack that follows would hide it.
_DIED = re.compile(r"^(?:panic:|fatal error:|F\d{4} [\d:.]+ +\S+:\d+) (.+)", re.MULTILINE)
_ERROR = re.compile(r"^E\d{4} [\d:.]+ +\S+:\d+ (.+)", re.MULTILINE)


class Seaweed(Service):
    """An S3 server with conditional writes.

    :param ports: by SeaweedFS' own option names; default: free ones.
    :param weed: the binary.
    :param host: the one address it listens on.
    """

    name = "seaweed"
    start_timeout_s = 90

    def __init__(
        self,
        folder: Path,
        *,
        access_key: str,
        secret_key: str,
        weed: str,
        buckets: Sequence[str] = (),
        ports: dict[str, int] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.access_key = access_key
        self.secret_key = secret_key
        self.buckets = tuple(buckets)
        self.ports = ports or dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.data = folder / "seaweed"
        self._weed = weed
        self._client: Any = None
        temporary = str(self.data / "tmp")  # else its glog files fill /tmp
        keys = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
        super().__init__(folder, {"PATH": "/usr/bin:/bin", "HOME": temporary, "TMPDIR": temporary, **keys})

    @property
    def endpoint_url(self) -> str:
        """Where S3 answers."""
        return f"http://{self.host}:{self.ports['s3.port']}"

    @property
    def credentials(self) -> dict[str, str]:
        """The keys under the names that AWS' own tools read."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def command(self) -> Sequence[str]:
        ports = [f"-{option}={port}" for option, port in self.ports.items()]
        where = [f"-ip={self.host}", f"-ip.bind={self.host}"]
        fixed = [*where, "-admin.ui=false", "-webdav=false", "-master.telemetry=false"]
        unused = ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
        return [self._weed, "mini", f"-dir={self.data}", *fixed, *unused, *ports]

    def prepare(self) -> None:
        super().prepare()
        (self.data / "tmp").mkdir(parents=True, exist_ok=True)
        (self.data / "mini.options").unlink(missing_ok=True)  # would bring back the options of the last start
        # The master keeps its data in a folder that is named after its port.
        home = self.data / f"m{self.ports['master.port']}"
        for old in self.data.glob("m[0-9]*"):
            if old != home and not home.exists():
                old.rename(home)

    def ready(self) -> bool:
        """Return whether an object comes back: S3 listens before it can store."""
        key = f"ready-{uuid.uuid4().hex}"
        try:
            self.make_bucket("mxdist-ready")
            self.client().put_object(Bucket="mxdist-ready", Key=key, Body=b"ready")
            self.client().delete_object(Bucket="mxdist-ready", Key=key)
            for bucket in self.buckets:
                self.make_bucket(bucket)
        except Exception as error:
            from botocore.exceptions import BotoCoreError, ClientError

            if isinstance(error, (BotoCoreError, ClientError)):
                return False
            raise
        return True

    def reason(self, log: str) -> str | None:
        """Return what it died of, or else its last error."""
        found = _DIED.findall(log)[:1] or _ERROR.findall(log)[-1:]
        return found[0].strip() if found else None

    def client(self) -> Any:
        """Return a boto3 client with the server's keys."""
        if self._client is None:
            import boto3
            from botocore.config import Config

            self._client = boto3.session.Session().client(
                "s3",
                endpoint_url=self.endpoint_url,
                region_name="us-east-1",
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                config=Config(
                    connect_timeout=2,
                    read_timeout=20,
                    retries={"total_max_attempts": 1},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    s3={"addressing_style": "path"},
                ),
            )
        return self._client

    def make_bucket(self, name: str | None = None) -> str:
        """Make a bucket unless it is there, and return its name; without a name, a fresh one."""
        name = name or f"test-{uuid.uuid4().hex[:16]}"
        known = {bucket["Name"] for bucket in self.client().list_buckets()["Buckets"]}
        if name not in known:
            self.client().create_bucket(Bucket=name)
        return name

    def cleanup(self) -> None:
        super().cleanup()
        remove_sockets(self.ports)


def remove_sockets(ports: Mapping[str, int]) -> None:
    """Remove what a killed server leaves in /tmp, where it insists on having its sockets."""
    for name in _SOCKETS:
        option = name.replace("-grpc", ".port.grpc") if name.endswith("grpc") else f"{name}.port"
        if option in ports:
            Path(f"/tmp/seaweedfs-{name}-{ports[option]}.sock").unlink(missing_ok=True)  # noqa: S108
