"""Connections to many hosts: opened at once, one a host, shared by all commands there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shlex
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from types import TracebackType
from typing import Any, Self, TypeVar

import asyncssh  # noqa: TID253  # loaded only by who connects

from mxdist.errors import LaunchError
from mxdist.ssh.access import DEFAULT_PORT, SshAccess, SshHost, match
from mxdist.ssh.process import SshProcess, pipe
from mxdist.ssh.trouble import Trouble, Witness, explain, forget, told_together

T = TypeVar("T")

_FIRST_PAUSE_S = 0.4
_LONGEST_PAUSE_S = 8.0
_KEEPALIVE_S, _KEEPALIVES = 5, 3
_ALGORITHMS = "+ssh-ed25519,ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521,rsa-sha2-512,rsa-sha2-256"
"""Beside those of the known keys, so that a host that shows a key of another kind is told by its fingerprint."""

_Key = tuple[str, str | None, int]


@dataclass(frozen=True)
class Done:
    """How a command ended.

    :param returncode: negative: the signal that ended it.
    """

    returncode: int
    stdout: bytes
    stderr: bytes

    @property
    def last_words(self) -> str:
        """The last line of what it wrote to standard error, else to standard output."""
        text = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        return text.splitlines()[-1][-500:] if text else "it said nothing"


class Ssh:
    """The connections of one user of hosts. They live in a thread of their own, so any thread may ask.

    Nothing but the command's own words stands on a command line of the host: whatever a command has to know goes
    through its standard input.
    """

    def __init__(self, access: SshAccess) -> None:
        self.access = access
        self._open: dict[_Key, asyncio.Task[asyncssh.SSHClientConnection]] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._key: asyncssh.SSHKey | None = access.client_key()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ssh", daemon=True)
        self._thread.start()
        library = logging.getLogger("asyncssh")
        if library.level == logging.NOTSET:  # it reports every connection and every command
            library.setLevel(logging.WARNING)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self, hosts: Iterable[SshHost]) -> None:
        """Connect to all hosts at once; connections that are there already stay.

        :raises LaunchError: naming every host that cannot be reached, and why.
        """
        wanted = list(hosts)
        troubles = self.reach(wanted)
        if troubles:
            raise told_together(list(troubles.values()), len(wanted))

    def reach(self, hosts: Iterable[SshHost]) -> dict[str, Trouble]:
        """Connect to all hosts at once; return by name what is wrong with those that cannot be reached."""
        found = self._do(_gather({host.name: self._connected(host) for host in hosts}))
        return {name: result for name, result in found.items() if isinstance(result, Trouble)}

    def run(self, host: SshHost, command: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Done:
        """Run a command to its end.

        :raises LaunchError: the host cannot be reached, or the command takes longer than ``timeout_s``.
        """
        result = self.run_all([host], command, stdin=stdin, timeout_s=timeout_s)[host.name]
        if isinstance(result, LaunchError):
            raise result
        return result

    def run_all(
        self, hosts: Iterable[SshHost], command: Sequence[str], *, stdin: bytes = b"", timeout_s: float
    ) -> Mapping[str, Done | LaunchError]:
        """Run a command on all hosts at once; return by name how it ended, or why it did not run."""
        found = self._do(_gather({host.name: self._run(host, command, stdin, timeout_s) for host in hosts}))
        return {name: one.error() if isinstance(one, Trouble) else one for name, one in found.items()}

    def open(self, host: SshHost, command: Sequence[str]) -> SshProcess:
        """Start a command and return it running.

        :raises LaunchError: the host cannot be reached, or refuses.
        """
        started = self._do(self._start(host, command))
        if isinstance(started, Trouble):
            raise started.error()
        return started

    def close(self) -> None:
        """Close all connections; commands that still run see the end of their input."""
        if self._loop.is_closed():
            return
        self._do(self._close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C
            future.cancel()
            raise

    async def _connected(self, host: SshHost) -> asyncssh.SSHClientConnection:
        """Return the connection to a host: the one that is there, else a new one, whoever asks first."""
        key = (host.name, self.access.user_of(host), self.access.port_of(host))
        task = self._open.get(key)
        if task is None or (task.done() and not _usable(task)):
            task = self._open[key] = self._loop.create_task(self._connect(host))
        return await asyncio.shield(task)

    async def _connect(self, host: SshHost) -> asyncssh.SSHClientConnection:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, self.access.connect_attempts + 1):
            witness = Witness()
            try:
                async with asyncio.timeout(self.access.connect_timeout_s):
                    return await self._attempt(host, witness)
            except (OSError, asyncssh.Error, ValueError) as error:
                trouble = explain(host, self.access, witness, error)
            await forget(witness.connection)
            if not trouble.again or attempt == self.access.connect_attempts:
                break
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311  # so that they do not come together again
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise _Failed(trouble)

    async def _attempt(self, host: SshHost, witness: Witness) -> asyncssh.SSHClientConnection:
        access = self.access
        own = {} if self._key is None else {"client_keys": [self._key], "agent_path": None}
        user = access.user_of(host)
        known = access.believed()
        return await asyncssh.connect(
            host.name,
            access.port_of(host),
            **({"username": user} if user else {}),
            **own,
            passphrase=access.passphrase,
            config=None,  # what a job does must not depend on the files of who happens to connect
            known_hosts=lambda name, _, port: match(known, name, port or DEFAULT_PORT),
            server_host_key_algs=_ALGORITHMS,
            preferred_auth="publickey",
            client_factory=lambda: witness,
            agent_forwarding=False,
            x509_trusted_certs=None,
            keepalive_interval=_KEEPALIVE_S,
            keepalive_count_max=_KEEPALIVES,
            connect_timeout=None,
            login_timeout=None,
        )

    async def _run(self, host: SshHost, command: Sequence[str], stdin: bytes, timeout_s: float) -> Done:
        async def to_its_end() -> Done:
            process = await self._session(host, command)
            try:
                out, err = await process.communicate(stdin)
            finally:
                process.close()
            if process.returncode is None:
                raise _Failed(Trouble(host.name, "the connection was lost while a command ran", "", True))
            return Done(process.returncode, out or b"", err or b"")

        await self._connected(host)  # which has a bound of its own
        try:
            return await asyncio.wait_for(to_its_end(), timeout_s)
        except TimeoutError:
            what = f"a command has not ended within {timeout_s:g} s"
            raise _Failed(Trouble(host.name, what, "The host may be overloaded, or hang on a disk.", True)) from None
        except asyncssh.Error as error:
            raise _Failed(
                Trouble(host.name, f"the connection was lost while a command ran ({error})", "", True)
            ) from None

    async def _session(self, host: SshHost, command: Sequence[str], **streams: Any) -> asyncssh.SSHClientProcess[bytes]:
        """Start a command; once more if the connection turns out to be dead."""
        connection = await self._connected(host)
        line = shlex.join(command)
        try:
            return await connection.create_process(line, encoding=None, request_pty=False, **streams)
        except asyncssh.ChannelOpenError as error:
            if not connection.is_closed():
                hint = "Raise MaxSessions in its sshd_config."
                raise _Failed(Trouble(host.name, f"sshd opens no session: {error.reason}", hint, True)) from None
        except (asyncssh.ConnectionLost, OSError):
            pass
        await forget(connection)
        connection = await self._connected(host)
        return await connection.create_process(line, encoding=None, request_pty=False, **streams)

    async def _start(self, host: SshHost, command: Sequence[str]) -> SshProcess | Trouble:
        in_read, in_write = pipe()
        out_read, out_write = pipe()
        try:
            remote = await self._session(host, command, stdin=in_read, stdout=out_write)
        except BaseException as error:
            for descriptor in (in_read, in_write, out_read, out_write):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            if isinstance(error, _Failed):
                return error.trouble
            if isinstance(error, asyncssh.Error):
                return Trouble(host.name, f"no command can be started ({error})", "", True)
            raise
        process = SshProcess(FileIO(in_write, "wb"), FileIO(out_read, "rb"), self._loop)
        task = self._loop.create_task(process.follow(remote))
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)
        return process

    async def _close_all(self) -> None:
        tasks = [task for task in self._open.values() if not task.cancel() and _usable(task)]
        await asyncio.gather(*(forget(task.result()) for task in tasks))
        await asyncio.gather(*self._followers, return_exceptions=True)


class _Failed(Exception):
    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.what)
        self.trouble = trouble


def _usable(task: asyncio.Task[asyncssh.SSHClientConnection]) -> bool:
    return not task.cancelled() and task.exception() is None and not task.result().is_closed()


async def _gather(work: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T | Trouble]:
    """Do all at once; what fails is returned in its place."""

    async def one(coroutine: Coroutine[Any, Any, T]) -> T | Trouble:
        try:
            return await coroutine
        except _Failed as failed:
            return failed.trouble

    results = await asyncio.gather(*(one(coroutine) for coroutine in work.values()))
    return dict(zip(work, results, strict=True))
