"""A world over MPI on two hosts: the agents start mpirun's daemons, and whoever is lost is named.

Both hosts are this machine; those of ``tests/cluster`` have networks and names of their own.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from world.conftest import Jobs, log_of, wait_until
from world.hosts import CLUSTER, FIRST, SECOND, across, agent, on_hosts
from world.toy import dataset, job_on

from mxdist import processes
from mxdist.spec import JobState

__all__ = ["dataset"]

SUM = """
    import horovod.mxnet as hvd, mxnet as mx
    hvd.init()
    total = hvd.allreduce(mx.nd.array([hvd.rank() + 1.0]), op=hvd.Sum, name="total").asscalar()
    print(f"sum {total:g} rank {hvd.rank()} of {hvd.size()} local {hvd.local_rank()} of {hvd.local_size()}", flush=True)
    hvd.shutdown()
"""
PATIENT = """
    import time
    import horovod.mxnet as hvd, mxnet as mx
    hvd.init()
    while True:
        hvd.allreduce(mx.nd.ones(4), name="gradient").asnumpy()
        print("begun", flush=True)
        time.sleep(0.1)
"""


@pytest.mark.parametrize("here", [FIRST, None], ids=["beside rank 0", "on a host without ranks"])
def test_ranks_of_two_hosts_reduce_together(jobs: Jobs, here: str | None) -> None:
    on_hosts(jobs, here=here)
    attempt = jobs.submit(across(jobs.job(SUM, ranks=2))).attempt
    result = jobs.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    assert {f"[{rank}] sum 3 rank {rank} of 2 local 0 of 1" for rank in (0, 1)} <= set(log_of(attempt))


@pytest.mark.parametrize("victim", ["orted", "agent"])
def test_lost_daemon_or_agent_is_named(jobs: Jobs, victim: str) -> None:
    on_hosts(jobs)
    attempt = jobs.submit(across(jobs.job(PATIENT, ranks=2))).attempt
    wait_until(lambda: {"[0] begun", "[1] begun"} <= set(log_of(attempt)), "both ranks")
    (daemon,) = [process.pid for process in processes.find(attempt.claim.token) if name_of(process.pid) == "orted"]
    os.kill(daemon if victim == "orted" else agent(attempt), signal.SIGKILL)
    result = jobs.result(attempt)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert (result.cause.host, result.cause.retryable) == (SECOND, True)
    assert result.cause.message.startswith("orted 1 was killed" if victim == "orted" else f"host {SECOND} is lost")


def test_training_goes_on_from_its_checkpoint_after_a_lost_host(jobs: Jobs, dataset: dict[str, Any]) -> None:  # noqa: F811
    on_hosts(jobs)
    job = job_on(
        dataset, epochs=12, checkpoints={"every_steps": 4}, cluster=CLUSTER,
        parallelism={"world_size": 2, "controller": "mpi"}, limits={"grace_s": 5, "max_restarts": 2},
    )  # fmt: skip
    attempt = jobs.submit(job).attempt
    wait_until(lambda: attempt.read_state().step > 8, "some steps")
    os.kill(agent(attempt), signal.SIGKILL)
    result = jobs.result(attempt)

    assert (result.state, result.restarts, result.steps) == (JobState.SUCCEEDED, 1, 48), result.cause
    assert any("going on from step" in line for line in log_of(attempt))


def name_of(pid: int) -> str:
    """Return the name of a process."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""
