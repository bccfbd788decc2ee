"""Horovod over MPI on nodes with networks, names, disks and processes of their own; mpirun itself uses no ssh."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.law import BOUND, make_law
from cluster.test_ssh import PATIENT, WORKDIR, Site, log_of

from mxdist.spec import JobState, Storage, TrainingJob
from mxdist.store import Credentials, open_store
from stack.processes import wait_until
from stack.seaweed import Seaweed
from support.guarding import guarded
from support.nodes import running_nodes
from support.places import REPOSITORY, control_bin

SUM = """
    import horovod.mxnet as hvd, mxnet as mx
    hvd.init()
    print(f"sum {hvd.allreduce(mx.nd.array([hvd.rank() + 1.0]), op=hvd.Sum, name='sum').asscalar():g}", flush=True)
    hvd.shutdown()
"""
MPI_PYTHON = Path(os.environ.get("MXDIST_NODE_MPI_PYTHON") or REPOSITORY / ".mxdist/node-mpi/bin/python")


@pytest.fixture(scope="module")
def mpi_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes whose Horovod has MPI, and an S3 server that they reach."""
    with running_nodes(2, python=MPI_PYTHON) as nodes, guarded(tmp_path_factory.mktemp("mpi-seaweed")) as folder:
        server = Seaweed(
            folder, access_key="mxdist-test", secret_key="mxdist-test-secret", weed=str(control_bin() / "weed"),
            host=nodes.gateway,
        )  # fmt: skip
        server.start()
        for node in nodes:
            node.exec(["install", "-d", "-o", "trainer", "-m", "700", WORKDIR])
        credentials = Credentials(server.access_key, server.secret_key)
        uri = f"s3://{server.make_bucket()}/runs"
        runs = open_store(uri, endpoint_url=server.endpoint_url, credentials=credentials)
        yield Site(nodes, server, runs, tmp_path_factory.mktemp("mpi-job"))
        server.stop()


def over_mpi(job: TrainingJob) -> TrainingJob:
    document: dict[str, Any] = job.to_document()
    found = TrainingJob.parse({**document, "parallelism": {**document["parallelism"], "controller": "mpi"}})
    assert isinstance(found, TrainingJob)
    return found


def nothing_left(site: Site) -> bool:
    shared = [path for node in site.nodes for path in (node.root / "dev/shm").glob("mxdist-*")]
    return not site.left() and not shared


def test_a_world_over_mpi_has_the_weights_of_one_process(mpi_site: Site, tmp_path: Path) -> None:
    credentials = Credentials(mpi_site.seaweed.access_key, mpi_site.seaweed.secret_key)
    law = make_law(
        tmp_path, mpi_site.runs, storage=Storage(endpoint_url=mpi_site.seaweed.endpoint_url), credentials=credentials
    )
    attempt = mpi_site.submit(over_mpi(mpi_site.job(law.fields, ranks=2)), "law")
    result = mpi_site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    assert law.off(attempt, result) < BOUND
    assert wait_until(lambda: nothing_left(mpi_site), 30), mpi_site.left()


def test_a_bridge_of_containers_on_every_node_is_not_talked_over(mpi_site: Site) -> None:
    """They all have the same address, as Docker's have; no other node is behind any of them."""
    for node in mpi_site.nodes:
        for words in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"):
            node.exec(["ip", *words.split()])
    try:
        attempt = mpi_site.submit(over_mpi(mpi_site.script(SUM, hosts=2)), "bridge")
        result = mpi_site.result(attempt)
        assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
        assert {"[0] sum 3", "[1] sum 3"} <= set(log_of(attempt))
    finally:
        for node in mpi_site.nodes:
            node.exec(["ip", "link", "del", "docker0"])


def test_cancel_ends_everything_on_every_node(mpi_site: Site) -> None:
    attempt = mpi_site.submit(over_mpi(mpi_site.script(PATIENT, hosts=2)), "cancel")
    mpi_site.training(attempt)
    commands = [" ".join(one.command) for node in mpi_site.nodes for one in node.processes()]
    assert [line for line in commands if line.startswith("mpirun ")]
    assert [line for line in commands if line.startswith("orted ")]
    result = mpi_site.client().cancel(attempt, by="user", reason="enough")

    assert result.state is JobState.CANCELLED
    assert wait_until(lambda: nothing_left(mpi_site), 30), mpi_site.left()
