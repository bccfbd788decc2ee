"""Horovod over MPI on nodes with networks, names, disks and processes of their own; mpirun itself uses no ssh."""

from __future__ import annotations

from typing import Any

from cluster.law import BOUND, Law
from cluster.test_ssh import PATIENT, Site, law, log_of, site

from mxdist.spec import JobState, TrainingJob
from stack.processes import wait_until

__all__ = ["law", "site"]


def over_mpi(job: TrainingJob) -> TrainingJob:
    document: dict[str, Any] = job.to_document()
    found = TrainingJob.parse({**document, "parallelism": {**document["parallelism"], "controller": "mpi"}})
    assert isinstance(found, TrainingJob)
    return found


def nothing_left(site: Site) -> bool:
    shared = [path for node in site.nodes for path in (node.root / "dev/shm").glob("mxdist-*")]
    return not site.left() and not shared


def test_a_world_over_mpi_has_the_weights_of_one_process(site: Site, law: Law) -> None:  # noqa: F811
    attempt = site.submit(over_mpi(site.job(law.fields, ranks=2)), "law")
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    assert law.off(attempt, result) < BOUND
    assert wait_until(lambda: nothing_left(site), 30), site.left()


def test_cancel_ends_everything_on_every_node(site: Site) -> None:  # noqa: F811
    attempt = site.submit(over_mpi(site.script(PATIENT, hosts=2)), "cancel")
    site.training(attempt)
    commands = [" ".join(one.command) for node in site.nodes for one in node.processes()]
    assert [line for line in commands if line.startswith("mpirun ")]
    assert [line for line in commands if line.startswith("orted ")]
    result = site.client().cancel(attempt, by="user", reason="enough")

    assert result.state is JobState.CANCELLED
    assert wait_until(lambda: nothing_left(site), 30), site.left()
