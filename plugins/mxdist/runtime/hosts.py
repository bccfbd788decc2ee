"""The hosts of an attempt as its supervisor sees them: its own, and those where an agent works for it.

A ``HostLink`` starts, watches and ends the ranks of one host. The supervisor's own host needs no agent, and every other
one looks the same from here: what its ranks write is copied into the scratch folder as it grows.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mxdist.errors import HostLost, MxdistError
from mxdist.launch.hosts import LOOPBACK, HostPlan
from mxdist.runtime import nics
from mxdist.runtime.crew import Crew, Order, Started
from mxdist.runtime.meeting import Spot, find_network
from mxdist.runtime.place import Place, replace_file

T = TypeVar("T")

_AT_ONCE = 64


class HostLink(ABC):
    """One host of a world.

    :ivar name: of the host, for people.
    :ivar lost: why it cannot be reached any more; empty while it can.
    """

    name: str
    lost: str = ""

    @property
    @abstractmethod
    def code(self) -> Path:
        """Where that host has the code of the job."""

    @abstractmethod
    def open_world(
        self, number: int, job: Mapping[str, Any], names: Sequence[str], *, journal: bytes | None = None
    ) -> None:
        """Make the folder of a world.

        :param job: the job's document, with paths as they are on that host.
        :param names: of the processes that will run there.
        :param journal: what rank 0's journal begins with, if that rank runs there.
        :raises HostLost: the host is gone. So do all others here.
        """

    @abstractmethod
    def start(self, orders: Sequence[Order]) -> dict[str, Started]:
        """Start processes.

        :raises LaunchError: one could not be started.
        """

    @abstractmethod
    def reap(self) -> dict[str, int]:
        """Return the exit codes of those that ended since the last call."""

    @abstractmethod
    def stopped(self) -> Collection[str]:
        """Return those that a signal has stopped."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Replace a file in the folder of the world."""

    @abstractmethod
    def signal(self, number: int, *, spare: Collection[str]) -> None:
        """Send a signal to all processes of the job there but these."""

    @abstractmethod
    def abort(self, names: Sequence[str]) -> None:
        """Let these write their stacks, and end."""

    @abstractmethod
    def end(self, *, grace_s: float) -> None:
        """End all processes of the job there; all that they wrote is here then."""

    @abstractmethod
    def collect(self, name: str) -> None:
        """Bring a folder of the attempt's scratch folder here."""

    @abstractmethod
    def keep_port(self, address: str) -> int:
        """Return a port there that is kept for the world."""

    @abstractmethod
    def addresses(self) -> list[nics.Address]:
        """Return the addresses of that host."""

    @abstractmethod
    def listen(self, at: Sequence[str]) -> tuple[dict[str, int], str]:
        """Listen at some addresses; return the port at each, and the word that is said there."""

    @abstractmethod
    def reach(self, targets: Sequence[tuple[str, int, str]]) -> list[bool]:
        """Return which addresses that host can reach: see ``nics.reach``."""

    @abstractmethod
    def deaf(self) -> None:
        """Listen no more."""

    def close(self, *, clean: bool) -> None:  # noqa: B027  # the supervisor's own host needs no goodbye
        """Let go of the host; its processes have been ended.

        :param clean: also remove what the attempt has left there.
        """


class HereLink(HostLink):
    """The supervisor's own host."""

    def __init__(self, name: str, place: Place, *, spare: Callable[[], Collection[int]] = frozenset) -> None:
        self.name = name
        self._crew = Crew(place, spare=spare)
        self._listener: nics.Listener | None = None

    @property
    def code(self) -> Path:
        return self._crew.place.code

    def open_world(
        self, number: int, job: Mapping[str, Any], names: Sequence[str], *, journal: bytes | None = None
    ) -> None:
        self._crew.open_world(number, job, names)

    def start(self, orders: Sequence[Order]) -> dict[str, Started]:
        return {order.name: self._crew.start(order) for order in orders}

    def reap(self) -> dict[str, int]:
        return self._crew.reap()

    def stopped(self) -> set[str]:
        return self._crew.stopped()

    def write(self, name: str, data: bytes) -> None:
        replace_file(self._crew.folder / name, data)

    def signal(self, number: int, *, spare: Collection[str]) -> None:
        self._crew.signal(number, spare=spare)

    def abort(self, names: Sequence[str]) -> None:
        self._crew.abort(names)

    def end(self, *, grace_s: float) -> None:
        self._crew.end(grace_s=grace_s)

    def collect(self, name: str) -> None:
        """It is here already."""

    def keep_port(self, address: str) -> int:
        return self._crew.keep_port(address)

    def addresses(self) -> list[nics.Address]:
        return nics.addresses()

    def listen(self, at: Sequence[str]) -> tuple[dict[str, int], str]:
        self.deaf()
        self._listener = nics.Listener(at)
        return self._listener.ports, self._listener.word

    def reach(self, targets: Sequence[tuple[str, int, str]]) -> list[bool]:
        return nics.reach(targets)

    def deaf(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None


class Hosts:
    """All hosts of an attempt.

    :param plans: those that have ranks, in the order of the plan.
    :param here: the supervisor's own.
    :param has_ranks: whether that is one of them, under its name.
    :param open_link: reaches another host; raises ``LaunchError``.
    :param interface: the network that the job asks for.
    """

    def __init__(
        self,
        plans: Sequence[HostPlan],
        here: HereLink,
        *,
        has_ranks: bool = True,
        open_link: Callable[[HostPlan], HostLink] | None = None,
        interface: str | None = None,
    ) -> None:
        self.plans, self.here, self._open_link = tuple(plans), here, open_link
        self._interface = interface
        self._here = plans[0].name if has_ranks and open_link is None else here.name
        self._links: dict[str, HostLink] = {self._here: here} if has_ranks else {}
        self._spots: list[Spot] | None = None

    def move(self, plans: Sequence[HostPlan]) -> None:
        """Go on with other hosts than before; those that are left out are let go."""
        self.plans, self._spots = tuple(plans), None
        names = {host.name for host in plans}
        for name in [name for name in self._links if name not in names]:
            self._links.pop(name).close(clean=False)

    @property
    def links(self) -> list[HostLink]:
        """The hosts that have ranks, in the order of the plan; they must have been opened."""
        return [self._links[host.name] for host in self.plans]

    @property
    def all(self) -> list[HostLink]:
        """Those, and the supervisor's own if it has none."""
        return [*self.links, *([self.here] if self.here not in self._links.values() else [])]

    @property
    def own_name(self) -> str:
        """What the supervisor's own host is called."""
        return self.here.name

    def open(self, *, patience_s: float = 0.0, pause: Callable[[str], bool] = lambda _: False) -> None:
        """Reach every host, all at once; those that were lost are reached anew.

        :param patience_s: how long to try: a host may be starting.
        :param pause: waits a while after it was told what the matter is; returns whether to go on.
        :raises HostLost: one cannot be reached.
        """
        give_up = time.monotonic() + patience_s
        while True:
            try:
                return self._open()
            except HostLost as error:
                if not error.retryable or time.monotonic() > give_up or not pause(error.message):
                    raise

    def _open(self) -> None:
        missing = [host for host in self.plans if host.name not in self._links or self._links[host.name].lost]
        if missing:
            self._spots = None
        for host in missing:
            lost = self._links.pop(host.name, None)
            if lost is not None:
                lost.close(clean=False)
        problems = parallel(self._keep_open, missing)
        for problem in problems:
            if problem is not None:
                raise problem

    def _keep_open(self, host: HostPlan) -> MxdistError | None:
        """Reach one host, and keep the link whatever becomes of the others; return why it cannot be reached."""
        assert self._open_link is not None  # noqa: S101  # only our own host needs none
        try:
            self._links[host.name] = self._open_link(host)
        except MxdistError as error:
            return error
        return None

    def each(self, links: Iterable[HostLink], act: Callable[[HostLink], T]) -> list[T]:
        """Do something with hosts: with the others all at once and aside, with our own in this thread.

        :raises MxdistError: what the first failing one raised, once all are through.
        """
        own = [link for link in links]
        others = [link for link in own if link is not self.here]
        answers: dict[int, T] = {}
        with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(others)))) as pool:
            futures = [(link, pool.submit(act, link)) for link in others]
            try:
                if self.here in own:
                    answers[id(self.here)] = act(self.here)
            finally:
                failed = [future.exception() for _, future in futures]
        for error in failed:
            if error is not None:
                raise error
        answers |= {id(link): future.result() for link, future in futures}
        return [answers[id(link)] for link in own]

    def network(self) -> tuple[list[Spot], str]:
        """Return where each host is in the network, and the address of the supervisor's own host.

        :raises LaunchError: hosts do not reach each other.
        """
        if [host.name for host in self.plans] == [self._here] and self.here in self._links.values():
            return [Spot(LOOPBACK, "lo")], LOOPBACK
        if self._spots is None:
            links = self.all
            self._spots = find_network(links, lambda act: self.each(links, act), self._interface)
        return self._spots[: len(self.plans)], self._spots[self.all.index(self.here)].address

    def close(self, *, clean: bool) -> None:
        """Let go of all hosts."""
        links = [link for link in self._links.values() if link is not self.here]
        if links:
            self.each(links, lambda link: link.close(clean=clean))
        self._links = {name: link for name, link in self._links.items() if link is self.here}


def parallel(act: Callable[[HostPlan], T], hosts: Sequence[HostPlan]) -> list[T]:
    """Return what ``act`` returns for each host, all at once."""
    if not hosts:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return list(pool.map(act, hosts))
