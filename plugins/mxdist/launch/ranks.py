"""What each rank of a job is given: its command, its cores and its environment. Pure.

On the host that submits, all of it is known. On other hosts, the cores that a rank may have and the addresses at which
ranks meet are known only there: those are left out here, and named among a plan's ``runtime_names``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mxdist.cores import share_cores
from mxdist.launch import mpi
from mxdist.launch.hosts import LOOPBACK, HostPlan, Seat, seats
from mxdist.launch.roles import LOCATION_NAMES, worker_environment
from mxdist.spec import Controller, EvaluationJob, Limits, TrainingJob
from mxdist.spec.cluster import ClusterKind

GLOO_LOCATION_NAMES = ("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_HOSTNAME")
"""Variables of every rank that say where it is in the network, and where the others are."""

_GLOO_TIMEOUT_S = 30  # Horovod's own default: never wait less


@dataclass(frozen=True)
class RankPlan:
    """One rank: where it stands in the world, its cores, its command and its environment.

    :param cores: the cores it is bound to; empty: any of its host; None: an equal share, which its host decides.
    :param local_size: how many ranks its host has.
    """

    rank: int
    local_rank: int
    host: str
    cores: tuple[int, ...] | None
    command: tuple[str, ...]
    environment: dict[str, str]
    local_size: int = 1


def is_local(job: TrainingJob | EvaluationJob) -> bool:
    """Return whether all of ``job`` runs on the host that submits it."""
    return job.cluster.kind is ClusterKind.LOCAL


def plan_ranks(
    job: TrainingJob | EvaluationJob,
    job_key: str,
    hosts: Sequence[HostPlan],
    *,
    runs_uri: str,
    python: str,
    cores: Sequence[int],
) -> tuple[RankPlan, ...]:
    """Return all ranks of ``job``.

    :param cores: those of the host that submits; for jobs that run elsewhere they do not matter.
    """
    shared = {**worker_environment(job), "MXDIST_JOB_KEY": job_key, "MXDIST_RUNS_URI": runs_uri}
    command = (python, "-m", "mxdist.runtime.rank")
    found = []
    for seat in seats(hosts):
        own = share_cores(cores, seat.local_size, pin=job.cluster.pin_cores)[seat.local_rank] if is_local(job) else None
        threads = _threads(job, seat, own, len(cores))
        environment = {
            **threads,
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            **_user_environment(job),
            **_horovod(job, seat),
            **shared,
        }
        if own is None and not job.cluster.pin_cores:
            own = ()
        rank = RankPlan(seat.rank, seat.local_rank, hosts[seat.host].name, own, command, environment, seat.local_size)
        found.append(rank)
    return tuple(found)


def location_names(job: TrainingJob | EvaluationJob) -> tuple[str, ...]:
    """Return the variables that ranks get at the start, because only then it is known where in the network they are."""
    if is_local(job):
        return ()
    threads = () if job.cluster.threads_per_rank else ("OMP_NUM_THREADS",)
    gloo = GLOO_LOCATION_NAMES if job.parallelism.controller is Controller.GLOO else ()
    return (*gloo, "NCCL_SOCKET_IFNAME", *(LOCATION_NAMES if worker_environment(job) else ()), *threads)


def _threads(
    job: TrainingJob | EvaluationJob, seat: Seat, cores: tuple[int, ...] | None, usable: int
) -> dict[str, str]:
    if cores is None and not job.cluster.threads_per_rank:
        return {}
    threads = job.cluster.threads_per_rank or max(1, len(cores or ()) or usable // seat.local_size)
    return {"OMP_NUM_THREADS": str(threads)}


def _user_environment(job: TrainingJob | EvaluationJob) -> dict[str, str]:
    if isinstance(job, TrainingJob) and job.script is not None:
        return dict(job.script.env)
    return {}


def _horovod(job: TrainingJob | EvaluationJob, seat: Seat) -> dict[str, str]:
    limits = job.limits
    variables = {
        "HOROVOD_RANK": str(seat.rank),
        "HOROVOD_SIZE": str(job.parallelism.world_size),
        "HOROVOD_LOCAL_RANK": str(seat.local_rank),
        "HOROVOD_LOCAL_SIZE": str(seat.local_size),
        "HOROVOD_CROSS_RANK": str(seat.cross_rank),
        "HOROVOD_CROSS_SIZE": str(seat.cross_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **(gloo_location(LOOPBACK, "lo", LOOPBACK) if is_local(job) else {}),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(_GLOO_TIMEOUT_S, math.ceil(limits.start_timeout_s))),
        "HOROVOD_FUSION_THRESHOLD": str(job.parallelism.fusion_threshold_mb * 1024 * 1024),
        "HOROVOD_CYCLE_TIME": f"{job.parallelism.cycle_time_ms:g}",
        **({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if job.parallelism.across_processes else {}),
        **_stall_check(limits),
    }
    return mpi.environment(variables) if job.parallelism.controller is Controller.MPI else variables


def gloo_location(address: str, device: str, meeting: str) -> dict[str, str]:
    """Return where a rank is in the network.

    :param address: of its host; a name would have to be known to every host, else Horovod crashes.
    :param meeting: the address of Horovod's rendezvous.
    """
    return {
        "HOROVOD_HOSTNAME": address,
        "HOROVOD_GLOO_IFACE": device,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting,
    }


def _stall_check(limits: Limits) -> dict[str, str]:
    """Horovod's own stall check. It counts whole seconds, and a shutdown below the warning is refused.

    Its warning, which names the missing rank, comes up to four warning times after a stall began (two until it drops
    the tensor from its cache, two more until it misses it). So a fifth of the limit, for the watchdog to know whom to
    blame when the limit is reached.
    """
    warn_s = max(1, math.floor(limits.stall_timeout_s / 5))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(warn_s),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(warn_s + 1, math.ceil(limits.stall_timeout_s))),
    }
