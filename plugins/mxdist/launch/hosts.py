"""Which hosts a job runs on, and which rank sits where. Pure.

Ranks are dealt out as Horovod does it: in the order of the hosts, each filled to its slots before the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mxdist.errors import Problem, SpecError
from mxdist.spec.cluster import Cluster, ClusterKind
from mxdist.spec.job import BaseJob

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostPlan:
    """One host of a job.

    :param name: what the platform calls it; ``<node 1>`` while that is not known.
    :param slots: the ranks that it gets in this job.
    :param user: who to log in as, where ranks are started over ssh; None: as the job or the connection says.
    :param port: of its sshd; None: as the job or the connection says.
    """

    name: str
    slots: int
    user: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Seat:
    """Where one rank sits, in Horovod's words.

    :param host: index of its host.
    :param cross_rank: which of the hosts that have a rank with this ``local_rank`` its host is.
    :param cross_size: how many hosts have one.
    """

    rank: int
    host: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def place(job: BaseJob, hosts: Sequence[str] | None = None) -> tuple[HostPlan, ...]:
    """Return the hosts that ``job`` uses, in order; those that would get no rank are left out.

    :param hosts: their real names, where the platform chooses them; default: the inventory, or placeholders.
    :raises SpecError: there are fewer hosts or slots than the ranks need.
    """
    size, cluster = job.parallelism.world_size, job.cluster
    if cluster.kind is ClusterKind.LOCAL:
        return (HostPlan(hosts[0] if hosts else LOOPBACK, size),)
    offered = _inventory(cluster, size, hosts) if cluster.kind is ClusterKind.SSH else _nodes(cluster, size, hosts)
    return _fill(offered, size)


def seats(hosts: Sequence[HostPlan]) -> tuple[Seat, ...]:
    """Return the place of every rank, in the order of the ranks."""
    having = Counter(local for host in hosts for local in range(host.slots))
    met: Counter[int] = Counter()
    found: list[Seat] = []
    for index, host in enumerate(hosts):
        for local in range(host.slots):
            found.append(Seat(len(found), index, local, host.slots, met[local], having[local]))
            met[local] += 1
    return tuple(found)


def _inventory(cluster: Cluster, size: int, names: Sequence[str] | None) -> list[HostPlan]:
    known = [host for host in cluster.inventory if names is None or host.name in names]
    open_ended = sum(host.slots is None for host in known)
    rest = size - sum(host.slots or 0 for host in known)
    share = max(1, -(-rest // open_ended)) if open_ended else 0
    return [HostPlan(host.name, host.slots or share, host.user, host.port) for host in known]


def _nodes(cluster: Cluster, size: int, names: Sequence[str] | None) -> list[HostPlan]:
    count = len(names) if names is not None else cluster.nodes or (-(-size // cluster.slots) if cluster.slots else 1)
    slots = cluster.slots or -(-size // max(1, count))
    return [HostPlan(names[number] if names is not None else f"<node {number + 1}>", slots) for number in range(count)]


def _fill(offered: Sequence[HostPlan], size: int) -> tuple[HostPlan, ...]:
    used: list[HostPlan] = []
    left = size
    for host in offered:
        if left:
            used.append(replace(host, slots=min(host.slots, left)))
            left -= used[-1].slots
    if left:
        there = f"{len(offered)} host{'' if len(offered) == 1 else 's'} with {size - left} slots"
        raise SpecError("The job", [Problem("parallelism.world_size", f"{size} ranks do not fit on {there}")])
    return tuple(used)
