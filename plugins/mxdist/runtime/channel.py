"""A program on a host, and the pipes to it: what every way of reaching a host must offer.

Who starts programs on hosts is an ``Opener``: ssh, ``srun``, or any command that passes its input and output on. What
it returns is a ``Channel``. Nothing secret is ever part of a command: it goes through the channel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from mxdist import processes
from mxdist.environment import SECRET_NAMES, SUPERVISOR_SECRETS
from mxdist.errors import LaunchError
from mxdist.launch.hosts import HostPlan

MAX_LINE_BYTES = 4 << 20
_COMPLAINT_BYTES = 4 << 10
_CLOSE_S = 2.0


class Channel(ABC):
    """Input and output of one program. One thread reads; any may send, one at a time."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Write to the program's standard input; may wait while it does not read.

        :raises OSError: it is gone, or the way to it.
        """

    @abstractmethod
    def lines(self) -> Iterator[bytes]:
        """Yield what the program writes to its standard output, line by line without their ends, until it closes it."""

    @abstractmethod
    def close(self) -> None:
        """Close its input, and end what runs here for the channel. May be called twice, and from any thread."""

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """The program's exit code (negative: a signal's number), or None while it is not known."""

    @abstractmethod
    def complaint(self) -> str:
        """Return its last words on standard error, for people."""

    @property
    def pid(self) -> int | None:
        """The id of the process on this host that carries the channel, if there is one."""
        return None


class Opener(Protocol):
    """Starts programs on hosts. It may be called by several threads at once."""

    def open(self, host: HostPlan, argv: Sequence[str]) -> Channel:
        """Start a program on a host.

        :raises LaunchError: the host cannot be reached, with its name; ``retryable`` says whether that may pass.
        """


class CommandOpener:
    """Starts programs by a command on this host that passes its input and output on: ``srun``, ``ip netns exec``.

    :param prefix: the command; ``{host}`` in a word becomes the host's name.
    """

    def __init__(self, prefix: Sequence[str]) -> None:
        self.prefix = tuple(prefix)

    def open(self, host: HostPlan, argv: Sequence[str]) -> Channel:
        """See ``Opener``."""
        command = [word.replace("{host}", host.name) for word in self.prefix]
        kept_back = {processes.TOKEN_NAME, *SECRET_NAMES, *SUPERVISOR_SECRETS}  # srun would send them on as they are
        environment = {name: value for name, value in os.environ.items() if name not in kept_back}
        try:
            return PipeChannel([*command, *argv], environment)
        except OSError as error:
            raise LaunchError(f"cannot reach {host.name} by {command[0]}: {error}") from error


class PipeChannel(Channel):
    """A child process of this one."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        self._said = b""
        self._sending = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name="complaints", daemon=True)
        self._listener.start()

    def send(self, data: bytes) -> None:
        """See ``Channel``."""
        assert self._process.stdin is not None  # noqa: S101  # for the type checker
        with self._sending:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._process.stdin.fileno(), view) :]
                except ValueError as error:  # closed meanwhile
                    raise BrokenPipeError(str(error)) from None

    def lines(self) -> Iterator[bytes]:
        """See ``Channel``."""
        assert self._process.stdout is not None  # noqa: S101
        with (
            self._process.stdout as pipe,
            contextlib.suppress(ValueError, OSError),
            open(pipe.fileno(), "rb", closefd=False) as file,
        ):
            while line := file.readline(MAX_LINE_BYTES):
                yield line.rstrip(b"\r\n")

    def close(self) -> None:
        """See ``Channel``. Whoever waits in ``send`` is freed by the end of the process."""
        if self._sending.acquire(blocking=False):
            self._close_input()
            self._sending.release()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._sending:
            self._close_input()

    def _close_input(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    @property
    def returncode(self) -> int | None:
        """See ``Channel``."""
        return self._process.poll()

    def complaint(self) -> str:
        """See ``Channel``. The last words of a process that has ended are waited for."""
        if self._process.poll() is not None:
            self._listener.join(_CLOSE_S)
        return self._said.decode(errors="replace").strip()

    @property
    def pid(self) -> int:
        """See ``Channel``."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stderr is not None  # noqa: S101
        with contextlib.suppress(ValueError, OSError):
            while said := os.read(self._process.stderr.fileno(), 4096):
                self._said = (self._said + said)[-_COMPLAINT_BYTES:]
        self._process.stderr.close()
