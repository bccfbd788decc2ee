"""Programs on other hosts over ssh: the way from a supervisor to its agents."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from io import BufferedReader
from typing import TYPE_CHECKING

from mxdist.errors import LaunchError
from mxdist.launch.hosts import HostPlan
from mxdist.runtime.channel import MAX_LINE_BYTES, Channel
from mxdist.ssh.access import SshAccess

if TYPE_CHECKING:
    from mxdist.ssh import Ssh, SshProcess

_CLOSE_S = 2.0


class SshOpener:
    """Starts programs over ssh, one connection a host.

    :param hosts: those that will be asked for first: the connections to them are made ahead, all at once, and whoever
        asks for one that could not be reached is told of all that could not.
    """

    def __init__(self, access: SshAccess, hosts: Sequence[HostPlan] = ()) -> None:
        self._access = access
        self._hosts = tuple(hosts)
        self._ssh: Ssh | None = None
        self._failed: LaunchError | None = None
        self._untold: set[str] = set()
        self._ready = threading.Event()
        threading.Thread(target=self._prepare, name="ssh connections", daemon=True).start()

    def open(self, host: HostPlan, argv: Sequence[str]) -> Channel:
        """See ``Opener``."""
        self._ready.wait()
        if self._failed is not None and (self._ssh is None or host.name in self._untold):
            self._untold.discard(host.name)  # who asks once more has it tried once more
            raise self._failed
        assert self._ssh is not None  # noqa: S101  # else something failed
        return SshChannel(self._ssh.open(host, argv))

    def close(self) -> None:
        """Close all connections."""
        self._ready.wait()
        if self._ssh is not None:
            self._ssh.close()

    def _prepare(self) -> None:
        """Load asyncssh, which takes a while, and connect."""
        try:
            from mxdist.ssh.connections import Ssh
            from mxdist.ssh.trouble import told_together

            self._ssh = Ssh(self._access)
            troubles = self._ssh.reach(self._hosts)
            if troubles:
                self._untold = set(troubles)
                self._failed = told_together(list(troubles.values()), len(self._hosts))
        except LaunchError as error:
            self._failed = error
        except Exception as error:  # such as an asyncssh that is not installed: whoever asks has to hear it
            self._failed = LaunchError(f"no ssh connections can be made: {error!r}", retryable=False)
        finally:
            self._ready.set()


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
