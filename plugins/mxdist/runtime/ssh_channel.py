"""Programs on other hosts over ssh: the way from a supervisor to its agents."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from io import BufferedReader

from mxdist.errors import LaunchError
from mxdist.launch.hosts import HostPlan
from mxdist.runtime.channel import MAX_LINE_BYTES, Channel
from mxdist.ssh import Ssh, SshAccess, SshProcess

_CLOSE_S = 2.0
_ONE_ROUND_S = 1.0


class SshOpener:
    """Starts programs over ssh, one connection a host.

    :param hosts: those that are all needed: the connections to them are made ahead, all at once, and an error names
        every one of them that cannot be reached, not only the one asked for.
    """

    def __init__(self, access: SshAccess, hosts: Sequence[HostPlan] = ()) -> None:
        self._access = access
        self._hosts = tuple(hosts)
        self._ssh: Ssh | None = None
        self._failed: LaunchError | None = None
        self._told_at: float | None = None
        self._ready = threading.Event()
        threading.Thread(target=self._prepare, name="ssh connections", daemon=True).start()

    def open(self, host: HostPlan, argv: Sequence[str]) -> Channel:
        """See ``Opener``."""
        self._ready.wait()
        self._raise_what_failed()
        assert self._ssh is not None  # noqa: S101  # else something failed
        try:
            self._ssh.connect(self._hosts)
        except LaunchError as error:
            self._failed, self._told_at = error, time.monotonic()
            raise
        return SshChannel(self._ssh.open(host, argv))

    def close(self) -> None:
        """Close all connections."""
        self._ready.wait()
        if self._ssh is not None:
            self._ssh.close()

    def _prepare(self) -> None:
        """Load asyncssh, which takes a while, and connect."""
        try:
            self._ssh = Ssh(self._access)
            self._ssh.connect(self._hosts)
        except LaunchError as error:
            self._failed = error
        finally:
            self._ready.set()

    def _raise_what_failed(self) -> None:
        """Tell everybody who asks at about the same time the same; who asks later has it tried again."""
        if self._failed is None:
            return
        self._told_at = self._told_at or time.monotonic()
        if self._ssh is None or time.monotonic() - self._told_at < _ONE_ROUND_S:
            raise self._failed
        self._failed = self._told_at = None


class SshChannel(Channel):
    """A program on another host."""

    def __init__(self, process: SshProcess) -> None:
        self._process = process
        self._sending = threading.Lock()
        self._read = False

    def send(self, data: bytes) -> None:
        """See ``Channel``."""
        with self._sending:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._process.stdin.fileno(), view) :]
                except ValueError as error:  # closed meanwhile
                    raise BrokenPipeError(str(error)) from None

    def lines(self) -> Iterator[bytes]:
        """See ``Channel``."""
        self._read = True
        with contextlib.suppress(ValueError, OSError), BufferedReader(self._process.stdout) as file:  # which closes it
            while line := file.readline(MAX_LINE_BYTES):
                yield line.rstrip(b"\r\n")

    def close(self) -> None:
        """See ``Channel``."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except TimeoutError:
            self._process.kill()
        if not self._read:
            self._process.close()

    @property
    def returncode(self) -> int | None:
        """See ``Channel``."""
        return self._process.poll()

    def complaint(self) -> str:
        """See ``Channel``."""
        return self._process.stderr_tail()
