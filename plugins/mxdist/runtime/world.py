"""The ranks of one world, on all its hosts: started, watched and ended together."""

from __future__ import annotations

import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mxdist.errors import HostLost
from mxdist.launch import mpi
from mxdist.launch.plan import Plan, RankPlan, localize
from mxdist.launch.roles import RolePlan
from mxdist.runtime import mpi_reach, mpi_world
from mxdist.runtime.blame import Exit
from mxdist.runtime.crew import Order
from mxdist.runtime.crew import keep_port as keep_port
from mxdist.runtime.hosts import HostLink, Hosts
from mxdist.runtime.mpi_place import END_FILE
from mxdist.runtime.orders import Meeting, orders
from mxdist.runtime.place import JOURNAL, Place, log_of, read_json, tail, write_json
from mxdist.runtime.rendezvous import Rendezvous
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.tracking.journal import last_line

LOST_CODE = -signal.SIGKILL
"""The exit code of the processes of a host that was lost: its guard kills them."""


@dataclass
class Member(ABC):
    """One process of a world.

    :param folder: of the world, here: what the process writes elsewhere is copied there.
    """

    link: HostLink
    folder: Path
    pid: int = field(default=0, kw_only=True)
    exit_code: int | None = field(default=None, kw_only=True)
    ended_at: float = field(default=0.0, kw_only=True)

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    @property
    def host(self) -> str:
        """The name of its host."""
        return self.link.name

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return self.exit_code is None and self.name in self.link.stopped()

    @property
    def log(self) -> Path:
        """The file that takes its output."""
        return log_of(self.folder, self.name)


@dataclass
class Helper(Member):
    """A process that is no rank: a scheduler or a parameter server."""

    plan: RolePlan

    @property
    def name(self) -> str:
        return self.plan.name

    def exit(self) -> Exit:
        """Return how it ended."""
        return Exit(None, self.exit_code or 0, self.ended_at, tail(self.log), role=self.name, host=self.host)


@dataclass
class Rank(Member):
    """One rank's process."""

    plan: RankPlan

    @property
    def name(self) -> str:
        return f"rank {self.number}"

    @property
    def number(self) -> int:
        """The rank."""
        return self.plan.rank

    def result(self) -> dict[str, Any]:
        """Return what the rank reported of itself; empty if it could not."""
        return read_json(self.folder / f"rank-{self.number}.result.json")

    def exit(self) -> Exit:
        """Return how it ended."""
        code = self.exit_code if self.exit_code is not None else 0
        error = self.result().get("error")
        return Exit(self.number, code, self.ended_at, tail(self.log), error, host=self.host)


@dataclass
class World:
    """World number ``number`` of an attempt.

    :param ranks: empty until ``start``.
    :param helpers: the processes beside them; empty without parameter servers.
    """

    place: Place
    plan: Plan
    job: TrainingJob | EvaluationJob
    number: int
    hosts: Hosts
    rendezvous: Rendezvous
    meeting: Meeting
    ranks: list[Rank] = field(default_factory=list)
    helpers: list[Helper] = field(default_factory=list)

    @classmethod
    def prepare(cls, place: Place, plan: Plan, job: TrainingJob | EvaluationJob, number: int, hosts: Hosts) -> World:
        """Make the folder of the world, reach its hosts, and open its meeting point; no rank runs yet.

        :raises LaunchError: a host cannot be reached, or hosts do not reach each other.
        """
        hosts.open()
        spots, address = hosts.network()
        slots = [(spot.address, host.slots) for spot, host in zip(spots, hosts.plans, strict=True)]
        rendezvous = Rendezvous(slots, address)
        world = cls(place, plan, job, number, hosts, rendezvous, Meeting(spots, address, rendezvous.port))
        try:
            world._open()
        except BaseException:
            world.rendezvous.close()
            raise
        return world

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_json(self.folder / "job.json", localize(self.job, self.place.code).to_document())
        for rank in self.plan.ranks:
            log_of(self.folder, f"rank {rank.rank}").touch()
        for role in (*self.plan.roles, *self._daemons()):
            log_of(self.folder, role.name).touch()
        if self.plan.starter:
            log_of(self.folder, mpi.NAME).touch()
        self.hosts.each(self.hosts.all if self.plan.starter else self.hosts.links, self._open_at)
        if self.plan.roles:
            port = self.hosts.links[0].keep_port(self.meeting.spots[0].address)
            self.meeting = replace(self.meeting, scheduler_port=port)

    def _open_at(self, link: HostLink) -> None:
        names = [order.name for order in self._orders(link)]
        brings_journal = link is self.hosts.links[0] and link is not self.hosts.here
        journal = last_line(self.place.folder / JOURNAL) if brings_journal else None
        link.open_world(self.number, localize(self.job, link.code).to_document(), names, journal=journal)

    @property
    def folder(self) -> Path:
        """The world's scratch folder."""
        return self.place.world(self.number)

    def start(self) -> None:
        """Start every rank. Only the main thread may do so: the kernel ends the ranks when that thread ends.

        :raises LaunchError: a rank could not be started; those that were are left to ``end``.
        """
        links = self.hosts.links
        by_name = {host.name: link for host, link in zip(self.hosts.plans, links, strict=True)}
        self.helpers = [Helper(by_name[role.host], self.folder, role) for role in self.plan.roles]
        self.ranks = [Rank(by_name[plan.host], self.folder, plan) for plan in self.plan.ranks]
        places = self._places()
        for found in self.hosts.each(links, lambda link: link.start(mpi_world.in_place(self._orders(link), places))):
            for member in self.members():
                if member.name in found:
                    member.pid = found[member.name].pid

    def _places(self) -> mpi_world.Places:
        """Start mpirun, and return what each rank gets from it; empty for a world that needs none."""
        if not self.plan.starter:
            return {}
        role = RolePlan(mpi.NAME, 0, self.hosts.own_name, (), self._mpirun(), {})
        mpirun = Helper(self.hosts.here, self.folder, role)
        self.helpers.append(mpirun)
        self.helpers += [Helper(self.hosts.links[one.number], self.folder, one) for one in self._daemons()]
        mpirun.pid = mpirun.link.start([Order(role.name, role.command, {})])[role.name].pid
        return mpi_world.wait_for_places(
            self.folder, len(self.ranks), timeout_s=self.job.limits.start_timeout_s, ended=self._mpirun_ended,
            meanwhile=self._start_daemons,
        )  # fmt: skip

    def _mpirun(self) -> tuple[str, ...]:
        """Return mpirun's command, now that it is known where the hosts are."""
        if self.hosts.all == [self.hosts.here]:
            return self.plan.starter
        spots = self.meeting.spots
        slots = [(spot.address, host.slots) for spot, host in zip(spots, self.hosts.plans, strict=True)]
        networks = mpi_world.networks(self.hosts.all, {self.meeting.address, *(spot.address for spot in spots)})
        return mpi.command(slots, self.plan.python, networks)

    def _daemons(self) -> list[RolePlan]:
        links = self.hosts.links
        return mpi_world.daemons(self.plan, [n for n, link in enumerate(links) if link is not self.hosts.here])

    def _start_daemons(self) -> None:
        """Start those of mpirun's daemons that it has asked for since the last call."""
        place = {spot.address: f"orted {number}" for number, spot in enumerate(self.meeting.spots)}
        for address, command in mpi_reach.wanted(self.folder, self.plan.python):
            daemon = next(helper for helper in self.helpers if helper.name == place[address])
            if not daemon.pid:
                daemon.pid = daemon.link.start([Order(daemon.name, command, {})])[daemon.name].pid

    def _mpirun_ended(self) -> int | None:
        """Return mpirun's exit code; None while it runs, or is not needed."""
        self.reap()
        return next((helper.exit_code for helper in self.helpers if helper.name == mpi.NAME), None)

    def joined(self) -> set[int]:
        """Return the ranks that have met the others, or wait for them."""
        here = mpi_world.joined(self.folder, len(self.ranks)) if self.plan.starter else set()
        return self.rendezvous.joined() | here

    def members(self) -> list[Rank | Helper]:
        """Return all processes of the world."""
        return [*self.ranks, *self.helpers]

    def reap(self) -> list[Rank]:
        """Return the ranks that ended since the last call; those of a lost host have."""
        before = {rank.number for rank in self.running()}
        for link in self.hosts.all:
            codes = link.reap()
            for member in self.members():
                if member.link is link and member.exit_code is None and (link.lost or member.name in codes):
                    member.exit_code, member.ended_at = codes.get(member.name, LOST_CODE), time.monotonic()
        return [rank for rank in self.ranks if rank.exit_code is not None and rank.number in before]

    def lost(self) -> HostLink | None:
        """Return a host that was lost while some of its processes ran."""
        cut = (member.link for member in self.members() if member.exit_code in (None, LOST_CODE) and member.link.lost)
        return next(cut, None)

    def exits(self) -> list[Exit]:
        """Return how those ended that have."""
        return [member.exit() for member in self.members() if member.exit_code is not None]

    def running(self) -> list[Rank]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if rank.exit_code is None]

    def ask_to_stop(self, reason: str) -> None:
        """Tell the ranks to write a checkpoint and end. A script that asked for no Worker gets a TERM instead."""
        write_json(self.folder / "control.json", {"stop": True, "reason": reason})
        control = (self.folder / "control.json").read_bytes()
        self._with_each(lambda link: None if link is self.hosts.here else link.write("control.json", control))
        if not self.cooperative():
            self.signal(signal.SIGTERM)

    def cooperative(self) -> bool:
        """Return whether the ranks look at ``control.json``: mxdist's own loops do, and scripts that made a Worker."""
        if not isinstance(self.job, TrainingJob) or self.job.script is None:
            return True
        return any(self.folder.glob("rank-*.beat.json")) or (self.folder / "progress.json").exists()

    def signal(self, number: int) -> None:
        """Send a signal to every process of the job but this one; stopped ones are woken to hear it.

        Those that are no ranks are left alone: ranks may need them to end well.
        """
        spare = [helper.name for helper in self.helpers]
        self._with_each(lambda link: link.signal(number, spare=spare))

    def dump_stacks(self) -> None:
        """Let every rank write its Python stacks to its log, which ends it."""
        running = self.running()
        self._with_each(lambda link: link.abort([rank.name for rank in running if rank.link is link]))

    def collect(self, name: str) -> Path:
        """Bring a folder that rank 0 has left in its scratch folder here; return where it is."""
        self.ranks[0].link.collect(name)
        return self.place.folder / name

    def end(self, *, grace_s: float) -> None:
        """End every process of the job but this one, and collect the exit codes.

        :raises LaunchError: one could not be ended.
        """
        try:
            if self.plan.starter and not self.running():
                self._with_each(lambda link: link.write(END_FILE, b""))
                mpi_world.wait_for_end(self._mpirun_ended)
            self._with_each(lambda link: link.end(grace_s=grace_s))
        finally:
            self.reap()
            self.rendezvous.close()

    def _orders(self, link: HostLink) -> list[Order]:
        if link not in self.hosts.links:
            return []
        return orders(self.plan, self.job, self.hosts.links.index(link), self.meeting)

    def _with_each(self, act: Callable[[HostLink], None]) -> None:
        """Do something with every host that can be reached; the guard of one that is lost ends what runs there."""

        def guarded(link: HostLink) -> None:
            with contextlib.suppress(HostLost):
                act(link)

        self.hosts.each([link for link in self.hosts.all if not link.lost], guarded)
