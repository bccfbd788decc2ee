"""Reaching the hosts of a job before each world, and doing without one if the others have room for its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from mxdist.errors import HostLost, SpecError
from mxdist.launch.plan import Plan
from mxdist.runtime.hosts import Hosts


class Reacher:
    """Reaches hosts.

    :param possible: names of all hosts that the job may use; empty: those of the plan, and no others.
    :param replan: makes a plan for some of them; raises ``SpecError`` when they have too few slots.
    :param note: tells people.
    """

    def __init__(
        self,
        hosts: Hosts,
        possible: Sequence[str],
        replan: Callable[[Sequence[str]], Plan],
        note: Callable[[str], None],
    ) -> None:
        self._hosts, self._possible, self._replan, self._note = hosts, possible, replan, note
        self._gone: set[str] = set()

    def reach(self, plan: Plan, *, patience_s: float, pause: Callable[[str], bool]) -> Plan:
        """Reach all hosts of a plan; return it, or the one that does without those that cannot be reached.

        :param patience_s: how long a host is tried that the job cannot do without.
        :raises HostLost: such a host cannot be reached.
        """
        while True:
            try:
                self._hosts.open()
                return plan
            except HostLost as error:
                other = self._without(error.host) if error.retryable else None
                if other is None:
                    if not error.retryable or not pause(error.message):
                        raise
                    break
                self._note(f"{error.message}; going on without it")
                plan = other
                self._hosts.move(plan.hosts)
        self._hosts.open(patience_s=patience_s, pause=pause)
        return plan

    def avoid(self, plan: Plan, host: str) -> Plan:
        """Return the plan that does without a host from now on; the same one if the job cannot."""
        other = self._without(host)
        if other is None:
            self._note(f"{host} is to be avoided, but the job cannot do without it")
            return plan
        self._note(f"{host} is avoided from now on")
        self._hosts.move(other.hosts)
        return other

    def _without(self, host: str) -> Plan | None:
        left = [name for name in self._possible if name not in self._gone | {host}]
        if host == self._hosts.own_name or not left:
            return None
        try:
            plan = self._replan(left)
        except SpecError:
            return None
        self._gone.add(host)
        return plan


def plan_params(plan: Plan) -> dict[str, Any]:
    """Return facts of a plan, as they are recorded beside the job's own parameters."""
    first = plan.ranks[0]
    return {
        "host": os.uname().nodename,
        "cores": sum(len(rank.cores or ()) for rank in plan.ranks) or len(os.sched_getaffinity(0)),
        "threads_per_rank": first.environment.get("OMP_NUM_THREADS", "share"),
        **plan.effective,
    }
