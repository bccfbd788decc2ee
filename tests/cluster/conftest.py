"""Three nodes for the whole session, and services that they reach. Whoever needs them and lacks the right fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stack.mlflow import Mlflow
from stack.processes import wait_until
from stack.seaweed import Seaweed
from support.guarding import guarded
from support.nodes import Nodes, running_nodes
from support.places import control_bin, node_mpi_python
from support.slurm import WORKDIR, Slurm, running_slurm

_LINGER_S = 30.0


@pytest.fixture(scope="session")
def nodes_session() -> Iterator[Nodes]:
    """The nodes of the session; tests ask for ``nodes``. Their Horovod meets over Gloo and over MPI."""
    with running_nodes(3, python=node_mpi_python()) as made:
        yield made


@pytest.fixture
def nodes(nodes_session: Nodes) -> Iterator[Nodes]:
    """Three nodes, whole when the test begins: ``nodes[0].exec()``, ``cut()``, ``kill()``, ``fill_disk()``.

    A test that leaves processes of a job behind on any node fails.
    """
    nodes_session.restore()
    yield nodes_session
    for node in nodes_session:
        if node.alive():
            node.mend()

    def left() -> list[str]:
        found = [(node, process) for node in nodes_session for process in node.processes()]
        return [f"{node.name}: {process.command}" for node, process in found if "MXDIST_TOKEN" in process.environment]

    assert wait_until(lambda: not left(), _LINGER_S, poll_s=0.5), left()


@pytest.fixture(scope="session")
def slurm_session(nodes_session: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The Slurm of the session; tests ask for ``slurm``."""
    with running_slurm(nodes_session, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def slurm(nodes: Nodes, slurm_session: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """A Slurm over the three nodes, idle; its commands work on the control side."""
    slurm_session.restore()
    for name, value in slurm_session.environment.items():
        monkeypatch.setenv(name, value)
    for node in slurm_session.workers:
        node.exec(["sh", "-c", f"rm -rf {WORKDIR} /tmp/*.out; mkdir -m 700 {WORKDIR}"])
    return slurm_session


@pytest.fixture(scope="session")
def cluster_seaweed(nodes_session: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """The S3 server of the session, on the bridge: nodes and control side reach it at the same address."""
    with guarded(tmp_path_factory.mktemp("cluster-seaweed")) as folder:
        server = Seaweed(
            folder, access_key="mxdist-test", secret_key="mxdist-test-secret", weed=str(control_bin() / "weed"),
            host=nodes_session.gateway,
        )  # fmt: skip
        server.start()
        yield server
        server.stop()


@pytest.fixture
def cluster_bucket(cluster_seaweed: Seaweed) -> str:
    """A fresh, empty bucket that nodes reach."""
    if not cluster_seaweed.alive():
        cluster_seaweed.start()
    return cluster_seaweed.make_bucket()


@pytest.fixture(scope="session")
def cluster_mlflow(nodes_session: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    """An MLflow server on the bridge, for nodes and control side."""
    with guarded(tmp_path_factory.mktemp("cluster-mlflow")) as folder:
        server = Mlflow(folder, program=str(control_bin() / "mlflow"), host=nodes_session.gateway)
        server.start()
        yield server
        server.stop()
