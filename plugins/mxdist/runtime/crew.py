"""The processes of a job on one host: started, watched and ended. The supervisor has one, and every agent.

Nothing here knows the job: what is to run comes as an ``Order``, which is plain data and can come over a wire. Only the
host fills in what is its own: folders, code, secrets, and which of its cores each process gets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdist import processes
from mxdist.cores import share_cores
from mxdist.errors import LaunchError
from mxdist.runtime.mpi_place import sweep
from mxdist.runtime.place import Place, log_of, write_json


@dataclass(frozen=True)
class Order:
    """One process to start.

    :param name: what people call it: ``rank 0``, ``server 1``.
    :param cores: the cores it is bound to; empty: any; None: an equal share of this host's.
    :param seat: which of how many ranks of this host it is: for its share.
    :param beside: the folder where its script lies; it runs there if this host has it, else beside the bundled one.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...] | None = ()
    seat: tuple[int, int] = (0, 1)
    beside: str | None = None

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Order:
        """Return an order that came as JSON."""
        cores = None if document["cores"] is None else tuple(document["cores"])
        return cls(
            str(document["name"]), tuple(document["command"]), dict(document["environment"]), cores,
            (int(document["seat"][0]), int(document["seat"][1])), document["beside"],
        )  # fmt: skip


@dataclass(frozen=True)
class Started:
    """A process that was started."""

    pid: int
    start_time: int


class Crew:
    """The processes of one attempt on this host, one world at a time.

    :param spare: returns ids of children of this process that are none of the job's: those that carry a channel.
    """

    def __init__(self, place: Place, *, spare: Callable[[], Collection[int]] = frozenset) -> None:
        self.place = place
        self._spare = spare
        self._number = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, Started] = {}
        self._ports: list[socket.socket] = []

    @property
    def folder(self) -> Path:
        """The scratch folder of the world."""
        return self.place.world(self._number)

    @property
    def busy(self) -> bool:
        """Whether a process of the world runs, as far as is known."""
        return bool(self._running)

    def open_world(self, number: int, job: Mapping[str, Any], names: Iterable[str]) -> None:
        """Make the folder of a world.

        :param job: the job's document, with paths as they are on this host.
        :param names: of the processes that will run here: each gets its log.
        """
        self._number = number
        self._running, self._started = {}, {}
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(self.folder / "job.json", job)
        for name in names:
            log_of(self.folder, name).touch()

    def keep_port(self, address: str) -> int:
        """Return a port at ``address`` that is kept for a process until the world ends."""
        kept = keep_port(address)
        self._ports.append(kept)
        return int(kept.getsockname()[1])

    def start(self, order: Order) -> Started:
        """Start one process. Only the main thread may: the kernel ends the process when the thread ends.

        :raises LaunchError: it could not be started.
        """
        try:
            process = self._spawn(order)
        except OSError as error:
            raise LaunchError(f"cannot start {order.name} ({order.command[0]}): {error}") from error
        self._running[order.name] = process
        self._started[order.name] = Started(process.pid, processes.start_time(process.pid) or 0)
        return self._started[order.name]

    def reap(self) -> dict[str, int]:
        """Return the exit codes (negative: a signal's number) of those that ended since; bury what they left behind."""
        ended = {name: code for name, process in self._running.items() if (code := process.poll()) is not None}
        for name in ended:
            del self._running[name]
        processes.bury_orphans({process.pid for process in self._running.values()} | set(self._spare()))
        return ended

    def stopped(self) -> set[str]:
        """Return those that a signal has stopped."""
        found = set()
        for name, process in self._running.items():
            seen = processes.read(process.pid)
            if seen is not None and seen.state in "Tt":
                found.add(name)
        return found

    def signal(self, number: int, *, spare: Collection[str] = ()) -> None:
        """Send a signal to every process of the job on this host; stopped ones are woken to hear it.

        :param spare: names of those that are left alone.
        """
        spared = {os.getpid(), *(process.pid for name, process in self._running.items() if name in spare)}
        for wanted in (number, signal.SIGCONT):
            for process in processes.find(self.place.token, exact=True, spare=self._spare()):
                if process.pid not in spared:
                    processes.send(process, wanted)

    def abort(self, names: Iterable[str]) -> None:
        """Let these write their Python stacks to their logs, which ends them."""
        for name in names:
            started = self._started.get(name)
            process = processes.read(started.pid) if started and name in self._running else None
            if process and started and process.start_time == started.start_time:
                processes.send(process, signal.SIGABRT)
                processes.send(process, signal.SIGCONT)

    def end(self, *, grace_s: float) -> None:
        """End every process of the job on this host but this one; exit codes are then to be reaped.

        :raises LaunchError: one could not be ended.
        """
        try:
            processes.terminate(
                self.place.token, grace_s=grace_s, exclude=(os.getpid(),), exact=True, spare=self._spare
            )
        finally:
            sweep(self.place.token, range(1, self._number + 1))
            while self._ports:
                self._ports.pop().close()

    def _spawn(self, order: Order) -> subprocess.Popen[bytes]:
        before = os.sched_getaffinity(0)
        cores = order.cores if order.cores is not None else share_cores(before, order.seat[1])[order.seat[0]]
        with log_of(self.folder, order.name).open("ab") as log:
            try:
                if cores:  # a child inherits the cores of the thread that forks it: so all its threads have them
                    os.sched_setaffinity(0, set(cores) & before or before)
                return subprocess.Popen(
                    order.command,
                    env=self._environment(order, len(cores) or max(1, len(before) // order.seat[1])),
                    cwd=self._cwd(order),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            finally:
                os.sched_setaffinity(0, before)

    def _environment(self, order: Order, threads: int) -> dict[str, str]:
        place = self.place
        path = [str(place.code), *filter(None, [order.environment.get("PYTHONPATH")])]
        return {
            **place.environment,
            "OMP_NUM_THREADS": str(threads),
            **order.environment,
            **place.secrets,
            "MXDIST_ATTEMPT": str(place.attempt),
            "MXDIST_ATTEMPT_DIR": str(place.folder),
            "MXDIST_INCARNATION": str(self._number),
            processes.TOKEN_NAME: place.token,
            "MXDIST_WORLD_DIR": str(self.folder),
            "PYTHONPATH": os.pathsep.join(path),
        }

    def _cwd(self, order: Order) -> Path:
        """A script runs where it lies, so that it finds its files; everything else in the world's own folder."""
        if order.beside is None:
            return self.folder
        beside = Path(order.beside)
        with contextlib.suppress(OSError):  # a folder that this user may not look into
            if beside.is_dir():
                return beside
        return self.place.code / "user"


def keep_port(address: str = "127.0.0.1") -> socket.socket:
    """Return a bound socket whose port is kept for the scheduler of a world.

    It never listens. Linux lets another socket listen on its port all the same, because both allow their address to
    be used again, and gives the port to nobody who asks for any.
    """
    kept = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((address, 0))
    return kept
