"""The processes of a job on this host, found by the token in their environment.

A process id alone proves nothing: it may have been given to somebody else since. So a process is named by its id and
its start time, and a job by the token that every process of it carries in ``MXDIST_TOKEN``, however it forked,
changed its session or lost its parent. One that empties its environment, leaves its session and loses its parent is
adopted by the job's supervisor (``adopt_orphans``), and found as its child while that lives.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from mxdist.errors import LaunchError

TOKEN_NAME = "MXDIST_TOKEN"  # noqa: S105  # a name, not a secret
_PROC = Path("/proc")
_DEAD = "ZXx"
_KILL_WAIT_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """One living process.

    :param start_time: clock ticks after boot; with ``pid`` it names the process for good.
    :param state: one letter, as in ``ps``: ``T`` is stopped.
    """

    pid: int
    start_time: int
    parent: int
    session: int
    state: str


def read(pid: int) -> Process | None:
    """Return the process with this id, or None if it is gone or only a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    if not fields or fields[0] in _DEAD:
        return None
    return Process(pid=pid, start_time=int(fields[19]), parent=int(fields[1]), session=int(fields[3]), state=fields[0])


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks after boot; None if it is not alive."""
    process = read(pid)
    return process.start_time if process else None


def alive(pid: int, started: int) -> bool:
    """Return whether the very process that started at ``started`` is alive. A zombie is not."""
    return pid > 1 and start_time(pid) == started


def find(token: str, *, exact: bool = False, spare: Collection[int] = ()) -> list[Process]:
    """Return the job's living processes, oldest first.

    They carry the token, or descend from one that does, or share the session of one that leads it: a child that
    was given an empty environment is found as well.

    :param exact: leave out those of agents, which carry ``<token>.<number of the host>``.
    :param spare: ids of processes that do not belong to the job, nor do their descendants, whoever started them.
    """
    if not token:
        return []
    table = {process.pid: process for process in _own() if process.pid not in spare}
    found = {pid for pid in table if _carries(pid, token, exact)}
    sessions = {pid for pid in found if table[pid].session == pid}
    found |= {pid for pid, process in table.items() if process.session in sessions}
    grown = True
    while grown:
        children = {pid for pid, process in table.items() if process.parent in found and pid not in found}
        found |= children
        grown = bool(children)
    return sorted((table[pid] for pid in found), key=lambda process: (process.start_time, process.pid))


def terminate(
    token: str,
    *,
    grace_s: float,
    exclude: Collection[int] = (),
    exact: bool = False,
    spare: Callable[[], Collection[int]] = tuple,
) -> None:
    """End every process of the job: TERM, a time of grace, KILL, and a look that none is left.

    :param grace_s: seconds between TERM and KILL; 0 kills at once.
    :param exclude: ids of processes that stay: the caller's own.
    :param exact: see ``find``.
    :param spare: returns what ``find`` takes.
    :raises LaunchError: one of them could not be ended.
    """

    def others() -> list[Process]:
        return [process for process in find(token, exact=exact, spare=spare()) if process.pid not in exclude]

    if grace_s > 0 and _signal_all(others(), signal.SIGTERM):
        _wait_gone(others, grace_s)
    deadline = time.monotonic() + _KILL_WAIT_S
    while _signal_all(others(), signal.SIGKILL):
        if time.monotonic() > deadline:
            left = ", ".join(str(process.pid) for process in others())
            raise LaunchError(
                f"the processes {left} could not be killed.",
                hint="They may hang in the kernel (a dead disk or network share); look with `ps -o pid,stat,wchan`.",
            )
        _wait_gone(others, 0.5)


def send(process: Process, number: int) -> None:
    """Send a signal to exactly this process; nothing happens if it is gone."""
    if process.pid > 1 and alive(process.pid, process.start_time):
        try:
            os.kill(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, instead of the host's init.

    :raises OSError: the kernel refused.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def bury_orphans(known: Collection[int]) -> None:
    """Take the exit codes of adopted processes that have ended, so that they do not stay as zombies.

    Children that this process started itself are left to who waits for them: they are ``known``, or of its session.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in known or os.getsid(ended.si_pid) == os.getsid(0):
                return
            os.waitpid(ended.si_pid, 0)
        except (ChildProcessError, ProcessLookupError):  # there is none, or somebody else was waiting for it
            return


def host_identity() -> str:
    """Return what tells this host, boot and process namespace from others: where our process ids mean something."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return os.uname().nodename


def _own() -> Iterator[Process]:
    uid = os.getuid()
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != uid:
                continue
        except OSError:
            continue
        process = read(int(entry.name))
        if process:
            yield process


def _carries(pid: int, token: str, exact: bool) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    named = f"{TOKEN_NAME}={token}".encode()
    entries = environment.split(b"\0")
    return named in entries or (not exact and any(entry.startswith(named + b".") for entry in entries))


def _signal_all(found: Collection[Process], number: int) -> bool:
    for process in found:
        send(process, number)
    if number != signal.SIGKILL:
        for process in found:  # a stopped process hears TERM only when it runs again
            send(process, signal.SIGCONT)
    return bool(found)


def _wait_gone(others: Callable[[], Collection[Process]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while others() and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.25)
