"""Starts on a cluster that refuses half of them: no MPIJob is left to wait for keys that never come."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import LaunchError
from mxdist.launch.base import Life
from mxdist.launch.bundle import Bundle
from mxdist.launch.kubernetes import KubernetesLauncher
from mxdist.launch.kubernetes_api import Exists, Missing
from mxdist.spec import parse_job
from mxdist.store import Attempt, JobRun, open_store

KEYS = {"AWS_SECRET_ACCESS_KEY": "of-s3"}
BUNDLE = Bundle({"mxdist/__init__.py": b""})
AWAY = LaunchError("the API server does not answer")
FORBIDDEN = LaunchError("cannot create resource secrets", retryable=False)


class Server:
    """An API server with one namespace, that refuses what it is told to, or loses its answer.

    :param refuses: what it answers to each of these requests, instead of doing it.
    :param loses: what comes back for these requests, which are done all the same.
    """

    def __init__(self, refuses: dict[str, LaunchError] | None = None, loses: dict[str, LaunchError] | None = None):
        self.refuses, self.loses = refuses or {}, loses or {}
        self.made: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, Mapping[str, Any]] = {}
        self.running: list[dict[str, Any]] = []

    def create_job(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        name = manifest["metadata"]["name"]
        self._refuse("create_job")
        if name in self.made:
            raise Exists(f"{name} already exists")
        given = {"uid": uuid.uuid4().hex, "creationTimestamp": datetime.now(UTC).isoformat()}
        self.made[name] = {**manifest, "metadata": {**manifest["metadata"], **given}}
        self._lose("create_job")
        return self.made[name]

    def job(self, _: str, name: str) -> dict[str, Any]:
        self._refuse("job")
        if name not in self.made:
            raise Missing(f"{name} not found")
        return self.made[name]

    def jobs(self, *_: str) -> tuple[list[dict[str, Any]], str]:
        return list(self.made.values()), "1"

    def pods(self, *_: str) -> list[dict[str, Any]]:
        return self.running

    def delete_job(self, _: str, name: str) -> None:
        self._refuse("delete_job")
        uid = self.made.pop(name)["metadata"]["uid"]
        self.secrets = {k: v for k, v in self.secrets.items() if _owner(v) != uid}

    def create_secret(self, _: str, secret: Mapping[str, Any]) -> None:
        self._refuse("create_secret")
        if secret["metadata"]["name"] in self.secrets:
            raise Exists("already exists")
        self.secrets[secret["metadata"]["name"]] = secret
        self._lose("create_secret")

    def _refuse(self, what: str) -> None:
        if what in self.refuses:
            raise self.refuses[what]

    def _lose(self, what: str) -> None:
        if what in self.loses:
            raise self.loses[what]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    job = parse_job(
        {
            "name": "mnist", "script": {"path": "/home/ada/train.py"}, "parallelism": {"world_size": 2},
            "cluster": {
                "kind": "kubernetes", "nodes": 2, "kubernetes": {"namespace": "ml", "image": "registry.local/node:1"},
            },
        }
    )  # fmt: skip
    return JobRun(open_store(str(tmp_path / "runs")), "key").claim(job, after=0)


def launcher_of(server: Server) -> KubernetesLauncher:
    launcher = KubernetesLauncher()
    launcher.__dict__["api"] = server  # what asks the cluster
    return launcher


def start(server: Server, attempt: Attempt) -> bool:
    return launcher_of(server).start(attempt, BUNDLE, incarnation=1, secrets=KEYS)


@pytest.mark.parametrize("why", [AWAY, FORBIDDEN])
def test_job_whose_secret_is_refused_is_deleted_and_made_by_the_next_try(attempt: Attempt, why: LaunchError) -> None:
    server = Server(refuses={"create_secret": why})
    with pytest.raises(LaunchError) as caught:
        start(server, attempt)
    assert caught.value is why
    assert server.made == {}
    assert launcher_of(server).life(attempt) is Life.NEVER

    server.refuses = {}
    assert start(server, attempt)
    _has_its_keys(server)


def test_secret_whose_answer_is_lost_leaves_nothing(attempt: Attempt) -> None:
    server = Server(loses={"create_secret": AWAY})
    with pytest.raises(LaunchError, match="does not answer"):
        start(server, attempt)
    assert (server.made, server.secrets) == ({}, {})


def test_deletion_that_fails_as_well_hides_no_reason(attempt: Attempt) -> None:
    server = Server(refuses={"create_secret": FORBIDDEN, "delete_job": AWAY})
    with pytest.raises(LaunchError) as caught:
        start(server, attempt)
    assert caught.value is FORBIDDEN


def test_job_of_another_launcher_is_not_deleted(attempt: Attempt) -> None:
    server = Server()
    assert start(server, attempt)
    server.refuses = {"create_secret": AWAY}
    with pytest.raises(LaunchError, match="does not answer"):
        start(server, attempt)
    _has_its_keys(server)


def test_job_whose_answer_was_lost_is_ours(attempt: Attempt) -> None:
    server = Server(loses={"create_job": AWAY})
    assert start(server, attempt)
    _has_its_keys(server)


def test_job_that_was_not_made_is_told_in_the_first_words(attempt: Attempt) -> None:
    for refuses in ({"create_job": AWAY}, {"create_job": AWAY, "job": LaunchError("still away")}):
        with pytest.raises(LaunchError) as caught:
            start(Server(refuses=refuses), attempt)
        assert caught.value is AWAY


def test_job_of_another_launcher_is_not_ours_when_our_request_was_lost(attempt: Attempt) -> None:
    server = Server()
    assert start(server, attempt)
    server.refuses = {"create_job": AWAY}
    with pytest.raises(LaunchError) as caught:
        start(server, attempt)
    assert caught.value is AWAY
    _has_its_keys(server)


def test_job_that_is_refused_for_good_is_not_looked_for(attempt: Attempt) -> None:
    server = Server(refuses={"create_job": FORBIDDEN, "job": AssertionError("asked")})  # type: ignore[dict-item]
    with pytest.raises(LaunchError) as caught:
        start(server, attempt)
    assert caught.value is FORBIDDEN


def test_worker_that_crashes_counts_only_until_the_supervisor_was_heard_of(attempt: Attempt) -> None:
    server = Server()
    start(server, attempt)
    (made,) = server.made.values()
    made["status"] = {"conditions": [{"type": "Created", "status": "True"}]}
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    metadata = {"name": "a-worker-0", "creationTimestamp": "2026-01-01T00:00:00Z"}
    server.running = [{"metadata": metadata, "status": {"containerStatuses": [waiting]}}]
    assert launcher_of(server).life(attempt) is Life.DEAD

    heard = {"pid": 1, "host": "a-launcher", "host_identity": "x", "start_time": 0, "at": time.time()}
    attempt.supervisors.append(1, heard)
    assert launcher_of(server).life(attempt) is Life.ALIVE


def _owner(secret: Mapping[str, Any]) -> str:
    (owner,) = secret["metadata"]["ownerReferences"]
    return str(owner["uid"])


def _has_its_keys(server: Server) -> None:
    (job,), (secret,) = server.made.values(), server.secrets.values()
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]
    assert _owner(secret) == job["metadata"]["uid"]
