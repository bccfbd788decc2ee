"""A command on another host that looks like a child of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from io import FileIO
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import asyncssh

LOST = 255
"""The exit code of a command whose connection was lost: what ``ssh`` itself returns then."""

_TAIL_BYTES = 8 << 10


class SshProcess:
    """A running command, as ``subprocess.Popen[bytes]`` with pipes for its input and output.

    ``stdin`` and ``stdout`` are pipes of this host, for any thread. A lost connection ends ``stdout``.
    """

    def __init__(self, stdin: FileIO, stdout: FileIO, loop: asyncio.AbstractEventLoop) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._loop = loop
        self._ended = threading.Event()
        self._stderr: deque[bytes] = deque(maxlen=64)
        self._remote: asyncssh.SSHClientProcess[bytes] | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs; negative: the signal that ended it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended.

        :raises TimeoutError: it has not.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the command has not ended within {timeout} s")
        return LOST if self.returncode is None else self.returncode

    def kill(self) -> None:
        """Close the channel: the command sees the end of its input, and its output goes nowhere."""
        remote = self._remote
        if remote is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(remote.close)

    def close(self) -> None:
        """Close both pipes, and with them what still runs."""
        for pipe_end in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe_end.close()
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stderr_tail(self) -> str:
        """Return the last of what it wrote to its standard error."""
        return b"".join(self._stderr)[-_TAIL_BYTES:].decode(errors="replace").strip()

    async def follow(self, remote: asyncssh.SSHClientProcess[bytes]) -> None:
        """Keep what it says on standard error, and note its end. Runs in the connections' own loop."""
        self._remote = remote
        try:
            while chunk := await remote.stderr.read(4096):
                self._stderr.append(chunk)
            await remote.wait_closed()
        finally:
            code: Any = remote.returncode
            self.returncode = LOST if code is None else int(code)
            self._ended.set()


def pipe() -> tuple[int, int]:
    """Return a pipe, its reading end first; no child of this process inherits it."""
    return os.pipe()
