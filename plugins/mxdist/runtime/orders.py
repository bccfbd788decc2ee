"""From a plan to what each host is told to start, once the world's addresses and ports are known. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mxdist.launch import mpi
from mxdist.launch.plan import Plan, RankPlan, user_file
from mxdist.launch.ranks import gloo_location, is_local
from mxdist.launch.roles import PORT_NAME, RolePlan, location
from mxdist.runtime.crew import Order
from mxdist.runtime.meeting import Spot
from mxdist.spec import Controller, EvaluationJob, TrainingJob


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a world meet.

    :param spots: where each host is in the network, in the order of the plan.
    :param address: of Horovod's rendezvous, with ``port``.
    :param scheduler_port: of the scheduler on the first host; 0 without parameter servers.
    """

    spots: Sequence[Spot]
    address: str
    port: int
    scheduler_port: int = 0


def orders(plan: Plan, job: TrainingJob | EvaluationJob, host: int, meeting: Meeting) -> list[Order]:
    """Return what a host starts: servers first, for ranks come to them.

    :param host: its number in the plan.
    """
    name = plan.hosts[host].name
    members: list[RolePlan | RankPlan] = [*plan.roles, *plan.ranks]
    return [_order(member, job, host, meeting) for member in members if member.host == name]


def _order(member: RankPlan | RolePlan, job: TrainingJob | EvaluationJob, host: int, meeting: Meeting) -> Order:
    is_rank = isinstance(member, RankPlan)
    field, main = user_file(job)
    return Order(
        name=f"rank {member.rank}" if isinstance(member, RankPlan) else member.name,
        command=member.command,
        environment={
            **member.environment,
            **(_located(job, meeting.spots[host], meeting, is_rank=is_rank) if not is_local(job) else {}),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting.port),
            **({PORT_NAME: str(meeting.scheduler_port)} if meeting.scheduler_port else {}),
        },
        cores=member.cores,
        seat=(member.local_rank, member.local_size) if isinstance(member, RankPlan) else (0, 1),
        beside=str(main.parent) if field == "script.path" and main is not None else None,
    )


def _located(job: TrainingJob | EvaluationJob, spot: Spot, meeting: Meeting, *, is_rank: bool) -> dict[str, str]:
    """Return one network for all that talk: Gloo, NCCL, and MXNet's servers."""
    found = {"NCCL_SOCKET_IFNAME": f"={spot.device}"}
    if is_rank and job.parallelism.controller is Controller.GLOO:
        found |= gloo_location(spot.address, spot.device, meeting.address)
    if is_rank and job.parallelism.controller is Controller.MPI:
        found |= mpi.location(spot.device)
    if meeting.scheduler_port:
        found |= location(spot.address, meeting.spots[0].address)
    return found
