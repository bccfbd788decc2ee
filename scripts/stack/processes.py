"""Start, find and end processes so that exactly what was started is ended, whoever ends it.

Standard library only: this also runs when no environment has been built yet, or when it is broken.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05


class ServiceError(Exception):
    """A service did not start, did not answer or did not end. The text says which, and where its log is."""


@dataclass(frozen=True)
class Process:
    """One process, told apart from a later one with the same pid by its start time (clock ticks since boot)."""

    pid: int
    start_time: int

    def alive(self) -> bool:
        """Return whether it still runs; a zombie does not."""
        found = _stat(self.pid)
        return found is not None and found.start_time == self.start_time and not found.dead

    def send(self, signal_number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.pid > 1 and self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)


@dataclass(frozen=True)
class _Stat:
    pid: int
    state: str
    parent: int
    session: int
    start_time: int
    threads: int

    @property
    def dead(self) -> bool:
        """Whether it is a zombie; one with threads is still ending, and holds its ports."""
        return self.state in "ZX" and self.threads <= 1


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in brackets may hold spaces and brackets
    return _Stat(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), int(fields[17]))


def _all() -> list[_Stat]:
    found = (_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [item for item in found if item is not None and not item.dead]


def process(pid: int) -> Process | None:
    """Return the process that has this pid now, or None."""
    found = _stat(pid)
    return None if found is None or found.dead else Process(pid, found.start_time)


def family(leaders: Sequence[Process]) -> list[Process]:
    """Return these processes, everything in their sessions, and all descendants of those."""
    everything = _all()
    now = {item.pid: item.start_time for item in everything}
    # A session outlives its leader, and until then nobody else gets its number.
    sessions = {leader.pid for leader in leaders if now.get(leader.pid, leader.start_time) == leader.start_time}
    wanted = {pid for pid in sessions if pid in now}
    while True:
        more = {item.pid for item in everything if item.session in sessions or item.parent in wanted} - wanted
        if not more:
            break
        wanted |= more
    mine = os.getpid()
    return [Process(item.pid, item.start_time) for item in everything if item.pid in wanted and item.pid != mine]


def of_jobs(workdir: Path) -> list[Process]:
    """Return every process of a training job whose scratch folder lies under ``workdir``."""
    return [Process(item.pid, item.start_time) for item in _all() if _is_job(item.pid, f"{workdir}/".encode())]


def supervisors(workdir: Path) -> list[Process]:
    """Return the supervisors among them: who is asked to stop writes a checkpoint first."""
    return [item for item in of_jobs(workdir) if b"mxdist.runtime.supervisor" in _words(item.pid, "cmdline")]


def _is_job(pid: int, workdir: bytes) -> bool:
    environment = _words(pid, "environ")
    if pid == os.getpid() or not any(word.startswith(b"MXDIST_TOKEN=") for word in environment):
        return False
    values = [word.partition(b"=")[2] for word in environment] + _words(pid, "cmdline")
    return any(value.startswith(workdir) for value in values)


def _words(pid: int, what: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")
    except OSError:
        return []


def wait_until(condition: Callable[[], bool], timeout_s: float, *, poll_s: float = _POLL_S) -> bool:
    """Return whether the condition came true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True


def end(victims: Callable[[], list[Process]], *, grace_s: float, asked: Sequence[Process] = ()) -> None:
    """End whatever ``victims`` returns: TERM, wait, KILL, and verify; without a grace time KILL at once.

    :param asked: who gets the TERM; default: all. A leader that ends its own children does it in better order.
    :raises ServiceError: some are alive after all that.
    """
    if grace_s > 0:
        for victim in asked or victims():
            victim.send(signal.SIGTERM)
        wait_until(lambda: not victims(), grace_s)
    for _ in range(50):  # a fork may slip through between two looks
        left = victims()
        for victim in left:
            victim.send(signal.SIGKILL)
        if not left or wait_until(lambda: not victims(), 0.5):
            return
    raise ServiceError(f"these processes survive SIGKILL: {sorted(victim.pid for victim in victims())}")


def boot_id() -> str:
    """Return what tells this boot of the machine from others: pids and start times mean nothing across boots."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class PidFile:
    """Who runs a service, for whoever comes later. The process itself writes it (``become.py``)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Process | None:
        """Return the process that was started, alive or not; None if there never was one."""
        try:
            known = json.loads(self.path.read_text())
            return Process(known["pid"], known["start_time"]) if known["boot"] == boot_id() else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def clear(self) -> None:
        """Note that nothing runs."""
        self.path.unlink(missing_ok=True)


def spawn(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, folder: Path, pid_file: PidFile
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output appended to ``log``, and note it.

    The child writes the pid file itself before it becomes the command, so that a parent that is killed right
    after the fork leaves nothing that cannot be found.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    helper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("become.py")), str(pid_file.path), *command]
    with log.open("ab") as output:
        return subprocess.Popen(
            helper,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def tail(log: Path, lines: int = 15) -> str:
    """Return the end of a log, for an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:])
