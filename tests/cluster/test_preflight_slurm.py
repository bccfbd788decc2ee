"""A preflight of the nodes that Slurm gives: one ``srun`` for a moment, and every node looked at."""

from __future__ import annotations

import time
from typing import Any

from mxdist.launch.check import check
from mxdist.launch.findings import Preflight
from mxdist.launch.hosts import HostPlan
from mxdist.launch.platforms import OwnAccess, Platforms
from mxdist.spec.cluster import Cluster
from mxdist.spec.job import BaseJob
from mxdist.ssh import SshAccess
from mxdist.store import Credentials, open_store
from stack.processes import wait_until
from stack.seaweed import Seaweed
from support.node import PYTHON
from support.slurm import WORKDIR, Slurm


class Head(OwnAccess):
    """Slurm's commands are on its head node."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm

    def slurm(self, cluster: Cluster) -> tuple[HostPlan, SshAccess] | None:
        nodes = self._slurm.nodes
        access = SshAccess(user="root", key=nodes.key.read_text(), known_hosts=tuple(nodes.known_hosts))
        return HostPlan(self._slurm.head.address, 1), access


def look(slurm: Slurm, seaweed: Seaweed, bucket: str, access: OwnAccess | None = None, **asked: Any) -> Preflight:
    job = BaseJob.parse(
        {
            "name": "x",
            "cluster": {"kind": "slurm", "nodes": 3, "slots": 1, "python": PYTHON, "workdir": WORKDIR, "slurm": asked},
            "parallelism": {"world_size": 3},
            "storage": {"endpoint_url": seaweed.endpoint_url},
        }
    )
    keys = Credentials(seaweed.access_key, seaweed.secret_key)
    runs = open_store(f"s3://{bucket}/runs", endpoint_url=seaweed.endpoint_url, credentials=keys)
    return check(job, runs, Platforms(access=access), secrets=seaweed.credentials)


def test_every_node_of_an_allocation_is_looked_at(slurm: Slurm, cluster_seaweed: Seaweed, cluster_bucket: str) -> None:
    found = look(slurm, cluster_seaweed, cluster_bucket, Head(slurm))
    assert found.problems == (), found.describe()
    rows = found.to_document()["hosts"]
    assert rows["(cluster)"]["allocation"] == "3 of 3"
    assert {rows[node.name]["network"] for node in slurm.workers} == {node.address for node in slurm.workers}
    assert wait_until(lambda: set(slurm.jobs().values()) <= {"COMPLETED", "COMPLETING"}, 60), slurm.jobs()
    assert [node.exec(["ls", "-A", WORKDIR]).stdout for node in slurm.workers] == [""] * 3


def test_node_with_a_full_disk_by_way_of_the_head_node(
    slurm: Slurm, cluster_seaweed: Seaweed, cluster_bucket: str
) -> None:
    node = slurm.workers[1]
    node.fill_disk()
    try:
        found = look(slurm, cluster_seaweed, cluster_bucket, Head(slurm))
    finally:
        node.free_disk()
    assert [(one.host, one.check) for one in found.problems] == [(node.name, "disk")], found.describe()


def test_what_slurm_refuses_is_told_in_its_own_words(
    slurm: Slurm, cluster_seaweed: Seaweed, cluster_bucket: str
) -> None:
    found = look(slurm, cluster_seaweed, cluster_bucket, partition="none")
    (one,) = found.problems
    assert (one.host, one.check) == ("(cluster)", "allocation")
    assert "invalid partition" in one.problem.lower()


def test_busy_nodes_are_not_waited_for(slurm: Slurm, cluster_seaweed: Seaweed, cluster_bucket: str) -> None:
    slurm.run("sbatch", "--nodes=3", "--exclusive", "--wrap=sleep 600", "--output=/dev/null")
    assert wait_until(lambda: "RUNNING" in slurm.states().values(), 60)
    begin = time.monotonic()
    found = look(slurm, cluster_seaweed, cluster_bucket)
    assert time.monotonic() - begin < 20
    (one,) = found.problems
    assert (one.host, one.check) == ("(cluster)", "allocation")
    slurm.run("scancel", "--user=root")
