"""One place to sleep at, from which signals, ended children and other threads wake the supervisor."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from types import FrameType


class Wake:
    """Takes over the process's signals; only the main thread may make one.

    SIGTERM and SIGINT ask for an orderly end; SIGHUP means nothing to a process without a terminal.
    """

    def __init__(self) -> None:
        self.terminated = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGHUP):  # handlers, for an ignored signal would stay so in every rank
            signal.signal(number, _nothing)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._terminate)

    def call(self) -> None:
        """Wake the sleeper, from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            self._writer.send(b"\0")

    def wait(self, timeout_s: float, *, also: int | None = None) -> None:
        """Sleep until something happens, ``timeout_s`` at most.

        :param also: a file that wakes the sleeper as well when it can be read.
        """
        files = [self._reader.fileno(), *([also] if also is not None else [])]
        if self._reader.fileno() in select.select(files, [], [], timeout_s)[0]:
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True


def _nothing(number: int, frame: FrameType | None) -> None:
    """Only to be woken: the sleeper looks for itself what there is."""
