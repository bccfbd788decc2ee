"""The processes of MXNet's parameter servers beside the workers: one scheduler, some servers. Pure.

They find each other through the ``DMLC_*`` variables: the scheduler listens, servers and workers come to it. Which port
that is, is chosen when the world starts (``PORT_NAME``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mxdist.launch.hosts import LOOPBACK
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.cluster import ClusterKind
from mxdist.spec.parallelism import Strategy

PORT_NAME = "DMLC_PS_ROOT_PORT"
"""The variable of every process of the world that says where the scheduler listens."""

LOCATION_NAMES = ("DMLC_NODE_HOST", "DMLC_PS_ROOT_URI")
"""The variables that say where in the network a process is, and where the scheduler is."""


_MANY = ("server", "orted")


@dataclass(frozen=True)
class RolePlan:
    """One process that is no rank.

    :param role: ``scheduler`` or ``server``, as MXNet calls it; or ``mpirun``, or ``orted``, its daemon elsewhere.
    :param number: which of that role.
    :param cores: the cores it is bound to; empty: wherever the kernel likes, which among pinned workers is best.
    """

    role: str
    number: int
    host: str
    cores: tuple[int, ...]
    command: tuple[str, ...]
    environment: dict[str, str]

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.role} {self.number}" if self.role in _MANY else self.role


def has_servers(job: TrainingJob | EvaluationJob) -> bool:
    """Return whether parameter servers run beside the ranks of this job."""
    return isinstance(job, TrainingJob) and job.parallelism.strategy is Strategy.PARAMETER_SERVER


def worker_environment(job: TrainingJob | EvaluationJob) -> dict[str, str]:
    """Return what a rank must know to be a worker of parameter servers; empty without them."""
    return _environment(job, "worker") if has_servers(job) else {}


def location(address: str, scheduler: str) -> dict[str, str]:
    """Return where a process is in the network, and where the scheduler is: addresses.

    DMLC_INTERFACE would count only where DMLC_NODE_HOST is missing.
    """
    return {"DMLC_NODE_HOST": address, "DMLC_PS_ROOT_URI": scheduler}


def plan_roles(
    job: TrainingJob | EvaluationJob, python: str, hosts: Sequence[str] = (LOOPBACK,)
) -> tuple[RolePlan, ...]:
    """Return the scheduler and the servers of ``job``; none without parameter servers.

    :param hosts: those that have ranks: the scheduler is on the first, servers on one after the other.
    """
    if not has_servers(job):
        return ()
    numbered = [("scheduler", 0), *(("server", number) for number in range(job.parallelism.servers))]
    command = (python, "-m", "mxdist.runtime.server")
    return tuple(
        RolePlan(role, number, hosts[number % len(hosts)], (), command, {**_common(), **_environment(job, role)})
        for role, number in numbered
    )


def _common() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


def _environment(job: TrainingJob | EvaluationJob, role: str) -> dict[str, str]:
    return {
        "DMLC_ROLE": role,
        **(location(LOOPBACK, LOOPBACK) if job.cluster.kind is ClusterKind.LOCAL else {}),
        "DMLC_NUM_WORKER": str(job.parallelism.world_size),
        "DMLC_NUM_SERVER": str(job.parallelism.servers),
        "PS_VERBOSE": "0",
    }
