"""Datasets in a folder and on a real S3 server, with every request counted."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from unit.data.spy import Requests

import mxdist.store.s3
from mxdist.data.fetch import fetch
from mxdist.data.manifest import DatasetStore, open_dataset
from mxdist.data.prune import Pruned, prune
from mxdist.data.stage import Staged, stage
from mxdist.spec.cluster import Storage
from mxdist.store import Credentials, Store, open_store

PLUGINS = Path(__file__).parents[3] / "plugins"
DAY = "2026-12-01T00:00:00+00:00"


@dataclass
class Place:
    """Somewhere that datasets are kept, and the calls of mxdist.data on it."""

    uri: str
    endpoint_url: str | None = None
    credentials: Credentials | None = None
    opened: dict[str, DatasetStore] = field(default_factory=dict)

    @property
    def storage(self) -> Storage:
        return Storage(endpoint_url=self.endpoint_url, region=None)

    @property
    def runs_uri(self) -> str:
        return f"{self.uri}/runs"

    def runs(self) -> Store:
        """Return the run store of the jobs that train on what is here."""
        return open_store(self.runs_uri, endpoint_url=self.endpoint_url, credentials=self.credentials)

    def stage(self, source: Any, name: str = "data", **more: Any) -> Staged:
        options: dict[str, Any] = {"as_of": DAY, "storage": self.storage, "credentials": self.credentials, **more}
        return stage(source, self.uri, name, **options)

    def fetch(self, staged: Mapping[str, Any], cache: Path, **more: Any) -> Path:
        options: dict[str, Any] = {"storage": self.storage, "credentials": self.credentials, **more}
        return fetch(staged["manifest_uri"], staged["version"], cache, **options)

    def prune(self, name: str = "data", **more: Any) -> Pruned:
        options: dict[str, Any] = {"dry_run": False, "max_share": 1.0, "runs_uri": self.runs_uri, **more}
        return prune(self.uri, name, **options, storage=self.storage, credentials=self.credentials)

    def dataset(self, name: str = "data") -> DatasetStore:
        """Return the dataset, for looking at it; opened once, since making an S3 client takes a while."""
        if name not in self.opened:
            self.opened[name] = open_dataset(self.uri, name, self.storage, self.credentials)
        return self.opened[name]

    def store(self, name: str = "data") -> Store:
        return self.dataset(name).store

    def keys(self, name: str = "data", prefix: str = "") -> list[str]:
        return [entry.key for entry in self.store(name).list(prefix)]

    def process(self, python: str = sys.executable, **order: Any) -> subprocess.Popen[str]:
        """Start ``process.py``; ``finished`` waits for it."""
        environment = {"PYTHONPATH": str(PLUGINS), "PATH": os.environ["PATH"]}
        if self.credentials:
            environment["AWS_ACCESS_KEY_ID"] = str(self.credentials.access_key)
            environment["AWS_SECRET_ACCESS_KEY"] = str(self.credentials.secret_key)
        if order["do"] == "stage":
            order = {"uri": self.uri, "name": "data", "as_of": DAY, **order}
        document = json.dumps({**order, "endpoint_url": self.endpoint_url})
        command = [python, str(Path(__file__).with_name("process.py")), document]
        return subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a process of ``Place.process`` printed."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer


@pytest.fixture(scope="session")
def bucket_of_datasets(seaweed: Any) -> str:
    """One bucket for all tests here: each bucket of SeaweedFS takes volumes of its own, and these run out."""
    return str(seaweed.make_bucket())


@pytest.fixture
def s3(seaweed: Any, bucket_of_datasets: str) -> Place:
    """An empty prefix on the S3 server."""
    if not seaweed.alive():
        seaweed.start()  # an earlier test took it down
    bucket = bucket_of_datasets
    return Place(
        f"s3://{bucket}/{uuid.uuid4().hex[:8]}", seaweed.endpoint_url, Credentials.from_environment(seaweed.credentials)
    )


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place, once of each kind."""
    if request.param == "folder":
        return Place(str(tmp_path / "store"))
    s3: Place = request.getfixturevalue("s3")
    return s3


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Every S3 request of this process from here on."""
    seen = Requests()
    monkeypatch.setattr(mxdist.store.s3, "connect", seen.wrap(mxdist.store.s3.connect))
    return seen


@pytest.fixture
def fill(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes files into a new folder: ``fill({"a/b.txt": b"..."})``."""

    def write(files: Mapping[str, bytes], name: str = "source") -> Path:
        folder = tmp_path / name
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        return folder

    return write


def content(folder: Path) -> dict[str, str]:
    """Return path -> SHA-256 of all files of a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
