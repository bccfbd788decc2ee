"""One service: how it is started, when it is ready, how it is stopped."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stack.processes import PidFile, Process, ServiceError, end, family, spawn, tail

_LOOKED_AT_BYTES = 1 << 20  # of a log, for the reason of an end


class Service(ABC):
    """A process that listens on loopback and keeps its data in one folder.

    Whoever starts it need not be the one who stops it: a pid file in ``folder`` tells who runs.

    :param folder: state, pid file and log; made when needed.
    :param environment: the whole environment of the process.
    """

    name: str
    start_timeout_s: float = 120
    grace_s: float = 20

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.log = folder / f"{self.name}.log"
        self.pid_file = PidFile(folder / f"{self.name}.pid")
        self._mark = folder / f"{self.name}.settings"
        self._child: subprocess.Popen[bytes] | None = None
        self._log_begin = 0  # of what the last start wrote

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command line; it holds no secret."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether it does its work: an answer that needs it whole, not just an open port."""

    def prepare(self) -> None:
        """Make what the process needs before it starts."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def process(self) -> Process | None:
        """Return the process if it runs."""
        known = self.pid_file.read()
        return known if known is not None and known.alive() else None

    def alive(self) -> bool:
        """Return whether it runs."""
        self._reap()
        return self.process() is not None

    def settings(self) -> str:
        """Return a digest of command and environment."""
        return hashlib.sha256(json.dumps([*self.command(), self.environment], sort_keys=True).encode()).hexdigest()

    def current(self) -> bool:
        """Return whether it runs with these very settings."""
        return self.alive() and self._mark.exists() and self._mark.read_text() == self.settings()

    def spawn(self) -> None:
        """Start the process, unless it runs already with these settings.

        :raises ServiceError: its files cannot be written, as on a full disk.
        """
        if self.current():
            return
        if self.alive():
            self.stop()
        self.kill()  # what a dead one left in its session
        try:
            self.prepare()
            self._mark.write_text(self.settings())
            self._log_begin = self.log.stat().st_size if self.log.exists() else 0
            self._child = spawn(
                self.command(), environment=self.environment, log=self.log, folder=self.folder, pid_file=self.pid_file
            )
        except OSError as error:
            raise ServiceError(f"{self.name} cannot be started: {error}") from error

    def wait_ready(self) -> None:
        """Wait until it is ready.

        :raises ServiceError: it ended, or took too long.
        """
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            # First its process: another program may answer on its port.
            if self._child is not None and self._child.poll() is not None:
                raise self._failed(f"ended with exit code {self._child.returncode} while starting")
            if self.ready():
                return
            if time.monotonic() > deadline:
                raise self._failed(f"was not ready after {self.start_timeout_s:.0f} s")
            time.sleep(0.1)

    def start(self) -> None:
        """Start it and wait until it is ready."""
        self.spawn()
        self.wait_ready()

    def stop(self) -> None:
        """End it and everything it started: TERM, then KILL. Nothing happens if it does not run."""
        self._end(self.grace_s)

    def kill(self) -> None:
        """End it and everything it started at once, as a crash would."""
        self._end(0)

    def restart(self) -> None:
        """Stop it and start it again, on the same port with the same data."""
        self.stop()
        self.start()

    def _end(self, grace_s: float) -> None:
        leader = self.pid_file.read()
        if self._child is not None and leader is None:  # killed before it could note itself
            self._child.kill()
        if leader is not None:
            asked = [leader] if leader.alive() else []
            end(lambda: self._family(leader), grace_s=grace_s, asked=asked)
        if self._child is not None:
            self._child.wait(timeout=10)
        self.cleanup()

    def _family(self, leader: Process) -> list[Process]:
        self._reap()
        return family([leader])

    def cleanup(self) -> None:
        """Remove what the process leaves when it is gone, but for its data."""
        self.pid_file.clear()

    def _reap(self) -> None:
        if self._child is not None:
            self._child.poll()

    def reason(self, log: str) -> str | None:
        """Return the line of its log that says why it ended, if that can be told."""
        return None

    def last_words(self) -> str:
        """Return why it ended, in one line, or else the end of its log; and where the whole log is."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(self._log_begin, stream.seek(0, os.SEEK_END) - _LOOKED_AT_BYTES))
                reason = self.reason(stream.read().decode(errors="replace"))
        except OSError:
            reason = None
        return f"{reason} (log: {self.log})" if reason else f"the end of {self.log}:\n{tail(self.log)}"

    def _failed(self, what: str) -> ServiceError:
        return ServiceError(f"{self.name} {what}; {self.last_words()}")


def start_all(services: Sequence[Service]) -> None:
    """Start services side by side and wait until all are ready."""
    for service in services:
        service.spawn()
    for service in services:
        service.wait_ready()


def stop_all(services: Sequence[Service]) -> None:
    """Stop services side by side; all are tried before the errors are raised."""
    errors: list[str] = []

    def stop(service: Service) -> None:
        try:
            service.stop()
        except ServiceError as error:
            errors.append(f"{service.name}: {error}")

    with ThreadPoolExecutor(max_workers=len(services)) as pool:
        list(pool.map(stop, services))
    if errors:
        raise ServiceError("\n".join(errors))
