"""The ranks of one world: started, watched and ended together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxdist import processes
from mxdist.errors import LaunchError
from mxdist.launch.plan import LOOPBACK, USER_FOLDER, Plan, RankPlan, localize, user_file
from mxdist.launch.roles import PORT_NAME, RolePlan
from mxdist.runtime.blame import Exit
from mxdist.runtime.rendezvous import Rendezvous
from mxdist.spec import EvaluationJob, TrainingJob

_TAIL_BYTES = 16 << 10


@dataclass(frozen=True)
class Place:
    """Where an attempt lives on this host, and what its ranks must be told.

    :param secrets: values that go into the environment of the ranks and nowhere else.
    """

    folder: Path
    token: str
    attempt: int
    environment: Mapping[str, str]
    secrets: Mapping[str, str]

    @property
    def code(self) -> Path:
        """The code bundle."""
        return self.folder / "code"


@dataclass
class Member:
    """One process of a world."""

    process: subprocess.Popen[bytes]
    start_time: int
    folder: Path
    exit_code: int | None = field(default=None, kw_only=True)
    ended_at: float = field(default=0.0, kw_only=True)

    def reap(self) -> bool:
        """Note the exit code if the process has ended; return whether that is new."""
        if self.exit_code is not None:
            return False
        self.exit_code = self.process.poll()
        self.ended_at = time.monotonic()
        return self.exit_code is not None


@dataclass
class Helper(Member):
    """A process that is no rank: a scheduler or a parameter server."""

    plan: RolePlan

    def exit(self) -> Exit:
        """Return how it ended."""
        return Exit(None, self.exit_code or 0, self.ended_at, tail(log_of(self.folder, self.plan)), role=self.plan.name)


@dataclass
class Rank(Member):
    """One rank's process."""

    plan: RankPlan

    @property
    def number(self) -> int:
        """The rank."""
        return self.plan.rank

    @property
    def log(self) -> Path:
        """The file that takes its output."""
        return log_of(self.folder, self.plan)

    def result(self) -> dict[str, Any]:
        """Return what the rank reported of itself; empty if it could not."""
        return read_json(self.folder / f"rank-{self.number}.result.json")

    def exit(self) -> Exit:
        """Return how it ended."""
        code = self.exit_code if self.exit_code is not None else 0
        return Exit(self.number, code, self.ended_at, tail(self.log), self.result().get("error"))


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
    rendezvous: Rendezvous
    ranks: list[Rank] = field(default_factory=list)
    helpers: list[Helper] = field(default_factory=list)
    _port: socket.socket | None = None

    @classmethod
    def prepare(cls, place: Place, plan: Plan, job: TrainingJob | EvaluationJob, number: int) -> World:
        """Make the folder of the world and open its meeting point; no rank runs yet."""
        world = cls(place, plan, job, number, Rendezvous(len(plan.ranks)))
        world.folder.mkdir(mode=0o700, exist_ok=True)
        write_json(world.folder / "job.json", localize(job, place.code).to_document())
        members: list[RankPlan | RolePlan] = [*plan.ranks, *plan.roles]
        for member in members:
            log_of(world.folder, member).touch()
        world._port = keep_port() if plan.roles else None
        return world

    @property
    def folder(self) -> Path:
        """The world's scratch folder."""
        return self.place.folder / f"world-{self.number}"

    def start(self) -> None:
        """Start every rank. Only the main thread may do so: the kernel ends the ranks when that thread ends.

        :raises LaunchError: a rank could not be started; those that were are left to ``end``.
        """
        for role in self.plan.roles:
            self.helpers.append(Helper(*self._spawn(role), self.folder, role))
        for plan in self.plan.ranks:
            self.ranks.append(Rank(*self._spawn(plan), self.folder, plan))

    def reap(self) -> list[Rank]:
        """Return the ranks that ended since the last call, and bury what they left behind."""
        ended = [rank for rank in self.ranks if rank.reap()]
        for helper in self.helpers:
            helper.reap()
        living = (member for member in (*self.ranks, *self.helpers) if member.exit_code is None)
        processes.bury_orphans({member.process.pid for member in living})
        return ended

    def exits(self) -> list[Exit]:
        """Return how those ended that have."""
        members: list[Rank | Helper] = [*self.ranks, *self.helpers]
        return [member.exit() for member in members if member.exit_code is not None]

    def running(self) -> list[Rank]:
        """Return the ranks that have not ended."""
        return [rank for rank in self.ranks if rank.exit_code is None]

    def ask_to_stop(self, reason: str) -> None:
        """Tell the ranks to write a checkpoint and end. A script that asked for no Worker gets a TERM instead."""
        write_json(self.folder / "control.json", {"stop": True, "reason": reason})
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
        spared = {os.getpid(), *(helper.process.pid for helper in self.helpers)}
        for wanted in (number, signal.SIGCONT):
            for process in processes.find(self.place.token):
                if process.pid not in spared:
                    processes.send(process, wanted)

    def dump_stacks(self) -> None:
        """Let every rank write its Python stacks to its log, which ends it."""
        for rank in self.running():
            process = processes.read(rank.process.pid)
            if process and process.start_time == rank.start_time:
                processes.send(process, signal.SIGABRT)
                processes.send(process, signal.SIGCONT)

    def end(self, *, grace_s: float) -> None:
        """End every process of the job but this one, and collect the exit codes.

        :raises LaunchError: one could not be ended.
        """
        try:
            processes.terminate(self.place.token, grace_s=grace_s, exclude=(os.getpid(),))
        finally:
            self.reap()
            self.rendezvous.close()
            if self._port is not None:
                self._port.close()

    def _spawn(self, plan: RankPlan | RolePlan) -> tuple[subprocess.Popen[bytes], int]:
        """Start one process; return it with its start time."""
        try:
            process = self._start(plan)
        except OSError as error:
            raise LaunchError(f"cannot start {_name(plan)} ({plan.command[0]}): {error}") from error
        return process, processes.start_time(process.pid) or 0

    def _start(self, plan: RankPlan | RolePlan) -> subprocess.Popen[bytes]:
        before = os.sched_getaffinity(0)
        with log_of(self.folder, plan).open("ab") as log:
            try:
                if plan.cores:  # a child inherits the cores of the thread that forks it: so all its threads have them
                    os.sched_setaffinity(0, set(plan.cores) & before or before)
                return subprocess.Popen(
                    plan.command,
                    env=self._environment(plan),
                    cwd=self._cwd(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            finally:
                os.sched_setaffinity(0, before)

    def _environment(self, plan: RankPlan | RolePlan) -> dict[str, str]:
        place = self.place
        path = [str(place.code), *filter(None, [plan.environment.get("PYTHONPATH")])]
        return {
            **place.environment,
            **plan.environment,
            **place.secrets,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.rendezvous.port),
            **({PORT_NAME: str(self._port.getsockname()[1])} if self._port is not None else {}),
            "MXDIST_ATTEMPT": str(place.attempt),
            "MXDIST_ATTEMPT_DIR": str(place.folder),
            "MXDIST_INCARNATION": str(self.number),
            processes.TOKEN_NAME: place.token,
            "MXDIST_WORLD_DIR": str(self.folder),
            "PYTHONPATH": os.pathsep.join(path),
        }

    def _cwd(self) -> Path:
        """A script runs where it lies, so that it finds its files; everything else in the world's own folder."""
        field_name, main = user_file(self.job)
        if field_name == "script.path" and main is not None:
            return main.parent if main.parent.is_dir() else self.place.code / USER_FOLDER
        return self.folder


def log_of(folder: Path, plan: RankPlan | RolePlan) -> Path:
    """Return the file that takes the output of a process of a world."""
    return folder / f"{_name(plan).replace(' ', '-')}.log"


def _name(plan: RankPlan | RolePlan) -> str:
    return plan.name if isinstance(plan, RolePlan) else f"rank {plan.rank}"


def keep_port() -> socket.socket:
    """Return a bound socket whose port is kept for the scheduler of a world.

    It never listens. Linux lets another socket listen on its port all the same, because both allow their address to
    be used again, and gives the port to nobody who asks for any.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((LOOPBACK, 0))
    return kept


def tail(path: Path, limit: int = _TAIL_BYTES) -> bytes:
    """Return the last bytes of a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read(limit)
    except OSError:
        return b""


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object that another process may be replacing; empty if it is not there."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: object) -> None:
    """Replace a file by a JSON value, in one step for every reader."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def world_numbers(folder: Path) -> Iterator[int]:
    """Yield the numbers of the worlds that were ever prepared in an attempt's scratch folder."""
    for path in folder.glob("world-*"):
        number = path.name.partition("-")[2]
        if number.isdigit():
            yield int(number)
