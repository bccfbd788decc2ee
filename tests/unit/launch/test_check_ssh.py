"""A preflight of hosts over ssh, with real sshds: every host at once, every problem told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mxdist.launch.check import check
from mxdist.launch.findings import Preflight
from mxdist.launch.platforms import OwnAccess, Platforms
from mxdist.spec.cluster import Cluster
from mxdist.spec.job import BaseJob
from mxdist.ssh import SshAccess
from mxdist.store import open_store
from support.places import node_python
from support.sshd import Sshd, keygen, sshd

Doors = dict[str, Sshd]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """Three sshds, each at an address of its own of this host."""
    folder = tmp_path_factory.mktemp("doors")
    key = keygen(folder / "key")
    with ExitStack() as stack:
        found = {}
        for number in (2, 3, 4):
            address = f"127.0.0.{number}"
            found[address] = stack.enter_context(sshd(folder / address, key=key, address=address))
        yield found


class OneKey(OwnAccess):
    """Everybody is entered with one key."""

    def __init__(self, doors: Doors, *known: str) -> None:
        self._key = next(iter(doors.values())).key.read_text()
        self._known = known or tuple(door.known_host for door in doors.values())

    def ssh(self, cluster: Cluster) -> SshAccess:
        return SshAccess(key=self._key, known_hosts=self._known)


def look(doors: Doors, folder: Path, *more: str, access: OwnAccess | None = None, **cluster: Any) -> Preflight:
    hosts = [f"{address} port={door.port}" for address, door in doors.items()]
    document = {"kind": "ssh", "hosts": [*hosts, *more], "python": str(node_python()), "workdir": str(folder / "work")}
    size = len(document["hosts"])
    job = BaseJob.parse(
        {"name": "x", "cluster": {**document, "slots": 1, **cluster}, "parallelism": {"world_size": size}}
    )
    runs = open_store(str(folder / "runs"))
    return check(job, runs, Platforms(access=access or OneKey(doors)), secrets={})


def problems(found: Preflight) -> list[tuple[str, str, str]]:
    return [(one.host, one.check, one.problem) for one in found.problems]


def test_hosts_that_are_ready(doors: Doors, tmp_path: Path) -> None:
    found = look(doors, tmp_path)
    assert problems(found) == [], found.describe()
    assert found.hosts == 3
    rows = found.to_document()["hosts"]
    assert [rows[address]["login"] for address in doors] == ["ok"] * 3
    assert [rows[address]["versions"] for address in doors] == ["mxnet 1.9.1"] * 3
    assert all(rows[address]["network"] not in ("cut", "mixed", "none", "?") for address in doors)


def test_host_that_refuses_and_one_whose_key_is_another(doors: Doors, tmp_path: Path) -> None:
    first, second, third = doors.values()
    wrong = f"[{second.address}]:{second.port} {' '.join(third.host_key.with_suffix('.pub').read_text().split()[:2])}"
    access = OneKey(doors, first.known_host, wrong, third.known_host)
    found = look(doors, tmp_path, "127.0.0.9 port=1", access=access)
    told = {host: problem for host, check, problem in problems(found) if check == "login"}
    assert sorted(told) == ["127.0.0.3", "127.0.0.9"]
    assert "key" in told["127.0.0.3"]
    assert "refused" in told["127.0.0.9"].lower()
    assert {host for host, check, _ in problems(found) if check != "login"} == set()


def test_python_that_is_not_there(doors: Doors, tmp_path: Path) -> None:
    found = look(doors, tmp_path, python="/opt/none/python")
    assert [problem[:40] for _, _, problem in problems(found)] == ["there is no Python at /opt/none/python ("] * 3


def test_interface_that_no_host_has(doors: Doors, tmp_path: Path) -> None:
    found = look(doors, tmp_path, interface="ib7")
    assert [check for _, check, _ in problems(found)] == ["network"] * 3
    assert problems(found)[0][2].startswith("no address on ib7; it has ")
