"""A preflight of nodes that are really apart: what is wrong with one is told with its name, and in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from mxdist.launch.check import check
from mxdist.launch.findings import Preflight
from mxdist.launch.platforms import OwnAccess, Platforms
from mxdist.spec.cluster import Cluster
from mxdist.spec.job import BaseJob
from mxdist.ssh import SshAccess
from mxdist.store import Credentials, Store, open_store
from stack.mlflow import Mlflow
from stack.processes import wait_until
from stack.seaweed import Seaweed
from support.node import PYTHON, Node
from support.nodes import Nodes

WORKDIR = "/var/mxdist"


@dataclass(frozen=True)
class NodesAccess(OwnAccess):
    """The key that lets in everywhere, and the host keys that are believed."""

    nodes: Nodes
    known: tuple[str, ...]

    def ssh(self, cluster: Cluster) -> SshAccess:
        return SshAccess(user="trainer", key=self.nodes.key.read_text(), known_hosts=self.known)


@dataclass(frozen=True)
class Site:
    """Three nodes and an S3 server that they reach."""

    nodes: Nodes
    seaweed: Seaweed
    runs: Store

    @property
    def three(self) -> list[Node]:
        """The nodes, without a head node that Slurm's tests have added."""
        return list(self.nodes)[:3]

    def look(
        self,
        *hosts: str,
        known: tuple[str, ...] = (),
        runs: Store | None = None,
        uri: str | None = None,
        **cluster: Any,
    ) -> Preflight:
        """Look at some hosts, by default at all nodes."""
        named = list(hosts or [node.address for node in self.three])
        place = {"kind": "ssh", "hosts": named, "slots": 1, "python": PYTHON, "workdir": WORKDIR, **cluster}
        job = BaseJob.parse(
            {
                "name": "x",
                "cluster": place,
                "parallelism": {"world_size": len(named)},
                "storage": {"endpoint_url": self.seaweed.endpoint_url},
                "tracking": {"uri": uri},
            }
        )
        platforms = Platforms(access=NodesAccess(self.nodes, known or tuple(self.nodes.known_hosts)))
        return check(job, runs or self.runs, platforms, secrets=self.seaweed.credentials)

    def problems(self, found: Preflight) -> list[tuple[str, str]]:
        names = {node.address: node.name for node in self.nodes}
        return [(names.get(one.host, one.host), one.check) for one in found.problems]


@pytest.fixture
def site(nodes: Nodes, cluster_seaweed: Seaweed, cluster_bucket: str) -> Site:
    for node in nodes:
        node.exec(["sh", "-c", f"rm -rf {WORKDIR}; install -d -o trainer -m 700 {WORKDIR}"])
    keys = Credentials(cluster_seaweed.access_key, cluster_seaweed.secret_key)
    runs = open_store(f"s3://{cluster_bucket}/runs", endpoint_url=cluster_seaweed.endpoint_url, credentials=keys)
    return Site(nodes, cluster_seaweed, runs)


def text_of(found: Preflight, node: Node, name: str) -> str:
    (told,) = [one.problem for one in found.problems if (one.host, one.check) == (node.address, name)]
    return told


def test_three_ready_nodes(site: Site, cluster_mlflow: Mlflow) -> None:
    found = site.look(uri=cluster_mlflow.url)
    assert site.problems(found) == [], found.describe()
    rows = found.to_document()["hosts"]
    first, *others = [rows[node.address] for node in site.three]
    assert [row["network"] for row in (first, *others)] == [node.address for node in site.three]  # and not docker0
    assert (first["mlflow"], ["mlflow" in row for row in others]) == ("ok", [False, False])
    assert [entry.key for entry in site.runs.list("")] == []
    for node in site.three:
        assert wait_until(lambda node=node: node.processes() == [], 60), node.processes()
        assert node.exec(["ls", "-A", WORKDIR]).stdout == ""


def test_name_that_a_node_cannot_resolve(site: Site) -> None:
    node = site.three[1]
    hosts = node.root / "etc/hosts"
    before = hosts.read_text()
    hosts.write_text("127.0.0.1 localhost\n")
    try:
        found = site.look()
    finally:
        hosts.write_text(before)
    assert site.problems(found) == [(node.name, "names")]
    assert f"cannot resolve {node.name}: a name that a rank cannot resolve crashes Horovod" in text_of(
        found, node, "names"
    )


def test_full_disk(site: Site) -> None:
    node = site.three[2]
    node.fill_disk()
    try:
        found = site.look()
    finally:
        node.free_disk()
    assert site.problems(found) == [(node.name, "disk")]
    assert "No space left on device" in text_of(found, node, "disk")


@contextmanager
def no_way(here: Node, there: Node) -> Iterator[None]:
    """Keep one node from sending anything to another."""
    way = ["blackhole", f"{there.address}/32"]
    here.exec(["ip", "route", "add", *way])
    try:
        yield
    finally:
        here.exec(["ip", "route", "del", *way])


def test_nodes_that_do_not_reach_each_other(site: Site) -> None:
    first, second, third = site.three
    with no_way(second, third):
        found = site.look()
    assert site.problems(found) == [(second.name, "network"), (third.name, "network")]
    told = text_of(found, third, "network")
    assert f"{second.address} does not reach it ({third.address}: " in told
    assert "172.17.0.1: " in told
    assert found.matrix[1].split() == [first.address, ".", "ok", "ok"]
    assert [row.split()[1:] for row in found.matrix[2:]] == [["ok", ".", "no"], ["ok", "no", "."]]


def test_interface_by_its_network_or_device(site: Site) -> None:
    assert site.problems(site.look(interface=str(site.nodes.network))) == []
    found = site.look(interface="docker0")  # which is there on every node, and leads nowhere
    assert site.problems(found) == [(node.name, "network") for node in site.three]


def test_s3_that_is_away(site: Site) -> None:
    site.seaweed.stop()
    try:
        begin = time.monotonic()
        found = site.look()
        took_s = time.monotonic() - begin
    finally:
        site.seaweed.start()
    assert site.problems(found) == [("(submitter)", "store"), *((node.name, "store") for node in site.three)]
    assert took_s < 20


def test_host_key_that_is_another_and_sshd_that_refuses(site: Site) -> None:
    first, second, third = site.three
    known = tuple(site.nodes.known_hosts)
    first.new_host_key()
    first.restart_sshd()
    second.stop_sshd()
    try:
        found = site.look(known=known)
    finally:
        second.start_sshd()
    assert site.problems(found) == [(first.name, "login"), (second.name, "login")]
    assert "key" in text_of(found, first, "login")
    assert "refused" in text_of(found, second, "login").lower()


def test_sixteen_hosts_of_which_one_is_a_black_hole(site: Site) -> None:
    """Each node has five addresses, as if it were five hosts; at the sixteenth there is nobody."""
    spare = [str(address) for address in site.nodes.network.hosts()][100:]
    added = [(node, spare.pop()) for node in site.three for _ in range(5)]
    nobody = spare.pop()
    for node, address in added:
        node.exec(["ip", "addr", "add", f"{address}/24", "dev", "eth0"])
    try:
        known = tuple(f"{address} {node.host_key}" for node, address in added)
        for _ in range(3):  # other tests share the machine: the best of three is what preflight takes
            begin = time.monotonic()
            found = site.look(*(address for _, address in added), nobody, known=known)
            took_s = time.monotonic() - begin
            assert [host for host, check in site.problems(found) if check == "login"] == [nobody], found.describe()
            if took_s < 20:
                break
    finally:
        for node, address in added:
            node.exec(["ip", "addr", "del", f"{address}/24", "dev", "eth0"])
    assert took_s < 20


def test_node_that_takes_connections_and_then_says_nothing(site: Site) -> None:
    node = site.three[1]
    node.exec(["pkill", "-STOP", "-F", "/run/sshd.pid"])
    try:
        begin = time.monotonic()
        found = site.look()
        took_s = time.monotonic() - begin
    finally:
        node.exec(["pkill", "-CONT", "-F", "/run/sshd.pid"])
    assert took_s < 20
    assert site.problems(found) == [(node.name, "login")]
