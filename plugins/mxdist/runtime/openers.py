"""Which hosts a job has, which of them this is, and how the others are reached: by the kind of the cluster.

What the launcher has written into ``attempt.json`` comes first: ``hosts``, ``here``, and ``opener``::

    {"how": "ssh", ...}                          over ssh, with the key from the supervisor's secrets
    {"how": "srun"}                              a step of this Slurm allocation on each host
    {"how": "command", "prefix": ["ip", "netns", "exec", "{host}"]}   any command that passes input and output on
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxdist.environment import travelling
from mxdist.errors import HostLost, LaunchError
from mxdist.launch.hosts import HostPlan
from mxdist.launch.slurm_script import AGENT
from mxdist.launch.summon import command, frames
from mxdist.runtime.channel import CommandOpener, Opener
from mxdist.runtime.hosts import HereLink, Hosts
from mxdist.runtime.place import Place
from mxdist.runtime.remote import AgentLink
from mxdist.runtime.ssh_channel import SshOpener
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.cluster import ClusterKind
from mxdist.ssh import SshAccess

_GREET_S = 60.0


@dataclass(frozen=True)
class Summoner:
    """Starts the agents of an attempt.

    :param names: of all hosts that the job may use: each keeps its number, whichever of them have ranks.
    :param told: what stands in the attempt's ``attempt.json``.
    """

    place: Place
    job: TrainingJob | EvaluationJob
    names: Sequence[str]
    told: Mapping[str, Any]
    opener: Opener
    python: str
    wake: Callable[[], None]

    def link(self, host: HostPlan) -> AgentLink:
        """Start the agent of a host, and wait for its first word.

        :raises HostLost: it cannot be reached.
        """
        timeout_s = self.job.limits.link_timeout_s
        try:
            channel = self.opener.open(host, command(self.python))
        except HostLost:
            raise
        except LaunchError as error:
            raise HostLost(host.name, error.message, hint=error.hint, retryable=error.retryable) from error
        link = AgentLink(host.name, channel, self.place, self.wake, link_timeout_s=timeout_s)
        try:
            channel.send(frames(self._document(host)))
            link.greet(_GREET_S)
        except OSError:
            link.greet(_GREET_S)  # its last words say more
        return link

    def _document(self, host: HostPlan) -> dict[str, Any]:
        told = self.told
        return {
            "what": "agent",
            "code": told.get("code") or {"how": "image"},
            "python": None,
            "workdir": self.job.cluster.workdir or told.get("workdir"),
            "runs_uri": told["runs_uri"],
            "job_key": told["job_key"],
            "attempt": told["attempt"],
            "token": self.place.token,
            "storage": told["storage"],
            "environment": travelling(self.place.environment),
            "secrets": dict(self.place.secrets),
            "link_timeout_s": self.job.limits.link_timeout_s,
            "host": host.name,
            "number": self.names.index(host.name),
        }


def choose_opener(
    job: TrainingJob | EvaluationJob,
    told: Mapping[str, Any],
    secrets: Mapping[str, str],
    others: Sequence[HostPlan] = (),
) -> Opener:
    """Return how the other hosts of ``job`` are reached.

    :param secrets: the supervisor's: with the key for ssh.
    :param others: all of them: connections are made ahead.
    :raises LaunchError: no way is known.
    """
    asked = told.get("opener") or {}
    ways = {ClusterKind.SSH: "ssh", ClusterKind.KUBERNETES: "ssh", ClusterKind.SLURM: "srun"}
    how = asked.get("how") or ways.get(job.cluster.kind)
    if how == "command":
        return CommandOpener(asked["prefix"])
    if how == "srun":
        return CommandOpener(AGENT)
    if how == "ssh":
        access = SshAccess.from_environment(secrets).with_opener(asked).for_job(job.cluster.ssh)
        return SshOpener(access, others)
    raise LaunchError(f"no way to other hosts is known for a cluster of kind {job.cluster.kind}.", retryable=False)


def known_hosts(job: TrainingJob | EvaluationJob, told: Mapping[str, Any]) -> tuple[list[str] | None, str | None]:
    """Return the names of the hosts in their order, None where the job itself says them; and which of them this is."""
    return told.get("hosts"), told.get("here")


def gather(
    place: Place,
    job: TrainingJob | EvaluationJob,
    plans: Sequence[HostPlan],
    told: Mapping[str, Any],
    secrets: Mapping[str, str],
    *,
    here: str | None,
    wake: Callable[[], None],
) -> Hosts:
    """Return the hosts of an attempt; none of them is reached yet.

    :param here: the name of the supervisor's own, None if it has no ranks.
    """
    names = [host.name for host in plans]
    if job.cluster.kind is ClusterKind.LOCAL:
        return Hosts(plans, HereLink(os.uname().nodename, place))
    has_ranks = here in names
    python = job.cluster.python or sys.executable
    if names == [here]:
        return Hosts(plans, HereLink(names[0], place))
    others = [host for host in plans if host.name != here]
    possible = [host.name for host in job.cluster.inventory] or names
    summoner = Summoner(place, job, possible, told, choose_opener(job, told, secrets, others), python, wake)
    spared: list[AgentLink] = []

    def open_link(host: HostPlan) -> AgentLink:
        link = summoner.link(host)
        spared.append(link)
        return link

    def spare() -> list[int]:
        return [link.pid for link in spared if link.pid is not None]

    own = HereLink(here if here in names else os.uname().nodename, place, spare=spare)
    return Hosts(plans, own, has_ranks=has_ranks, open_link=open_link, interface=job.cluster.interface)
