"""Why a host cannot be reached, in words for who has to mend it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import asyncssh  # noqa: TID253  # loaded only by who connects

from mxdist.errors import LaunchError
from mxdist.ssh.access import USER_FILE, SshAccess, SshHost, match

_MAX_STARTUPS = (
    "Its sshd drops connections while too many are logging in: raise MaxStartups in its sshd_config (such as "
    "64:30:256) and reload it, or raise cluster.ssh.connect_attempts. An sshd from 9.8 on may also punish this address "
    "(PerSourcePenalties), and a firewall may cut in."
)


class Witness(asyncssh.SSHClient):
    """Remembers how far a connection came."""

    def __init__(self) -> None:
        self.connection: asyncssh.SSHClientConnection | None = None
        self.shown: asyncssh.SSHKey | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        """Note that the host took the connection."""
        self.connection = conn

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Note a host key that is not believed, and do not believe it."""
        self.shown = key
        return False

    def validate_host_ca_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Note the authority of a host certificate that is not believed."""
        self.shown = key
        return False

    @property
    def greeted(self) -> bool:
        """Whether the host has said that it is an sshd."""
        return self.connection is not None and bool(self.connection.get_extra_info("server_version"))


@dataclass(frozen=True)
class Trouble:
    """What is wrong with one host.

    :param again: whether one more attempt can help, in a moment.
    :param retryable: whether it can help later.
    """

    host: str
    what: str
    hint: str = ""
    again: bool = False
    retryable: bool = field(default=True, kw_only=True)

    def error(self) -> LaunchError:
        """Return it as an error."""
        return told_together([self])


def told_together(troubles: Sequence[Trouble], of: int = 0) -> LaunchError:
    """Return one error for all hosts that cannot be reached; equal hints are said once.

    :param of: how many hosts were tried.
    """
    hints = list(dict.fromkeys(trouble.hint for trouble in troubles if trouble.hint))
    retryable = all(trouble.retryable for trouble in troubles)
    lines = [f"{trouble.host}: {trouble.what}" for trouble in troubles]
    if len(lines) == 1:
        return LaunchError(f"cannot reach {lines[0]}", hint=" ".join(hints), retryable=retryable)
    count = f"{len(lines)} of {of} hosts" if of > len(lines) else f"{len(lines)} hosts"
    hint = "".join(f"\n  {hint}" for hint in hints)
    return LaunchError(f"cannot reach {count}:\n  " + "\n  ".join(lines), hint=hint, retryable=retryable)


def explain(host: SshHost, access: SshAccess, witness: Witness, error: BaseException) -> Trouble:
    """Return what an attempt to connect died of."""
    place = f"port {access.port_of(host)}"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return _host_key(host, access, witness, error)
    if isinstance(error, asyncssh.PermissionDenied):
        return _denied(host, access)
    if isinstance(error, TimeoutError):
        return _slow(host, access, witness, place)
    if witness.connection is None and isinstance(error, OSError):
        return _no_way(host, place, error)
    if isinstance(error, (asyncssh.ConnectionLost, OSError)):
        if not witness.greeted:
            return Trouble(host.name, f"sshd at {place} closed the connection before its banner", _MAX_STARTUPS, True)
        return Trouble(host.name, f"the connection to {place} was lost while logging in ({error})", "", True)
    if isinstance(error, asyncssh.DisconnectError):
        if not witness.greeted:
            what = f"what answers at {place} is no sshd ({error.reason})"
            return Trouble(host.name, what, "Check the port.", retryable=False)
        return Trouble(host.name, f"sshd at {place} refuses: {error.reason}", retryable=False)
    return Trouble(host.name, f"{type(error).__name__}: {error}", retryable=False)


def _no_way(host: SshHost, place: str, error: OSError) -> Trouble:
    if isinstance(error, socket.gaierror):
        hint = "Check the spelling in cluster.hosts, and the resolver of the host that connects."
        what = f"its name does not resolve ({error.strerror})"
        return Trouble(host.name, what, hint, error.errno == socket.EAI_AGAIN)
    if isinstance(error, ConnectionRefusedError) or "refused" in str(error).lower():
        hint = "Start sshd there, or give the right port."
        return Trouble(host.name, f"nothing listens at {place} (connection refused)", hint, True)
    return Trouble(host.name, f"no way to {place}: {error.strerror or error}", "Check network and firewall.", True)


def _host_key(host: SshHost, access: SshAccess, witness: Witness, error: asyncssh.HostKeyNotVerifiable) -> Trouble:
    port, key = access.port_of(host), witness.shown
    if key is None:  # revoked, or a certificate that does not fit
        hint = f"Do not connect before somebody has looked at it; it is compared with {access.believed_from}."
        return Trouble(host.name, f"its host key is not good: {error.reason}", hint, retryable=False)
    known, authorities, *_ = match(access.believed(), host.name, port)
    shown = f"{_kind(key)} {key.get_fingerprint()}"
    look = f"`ssh-keyscan -p {port} {host.name}`" if port != 22 else f"`ssh-keyscan {host.name}`"
    check = "On its console, `for key in /etc/ssh/ssh_host_*.pub; do ssh-keygen -lf $key; done` prints what is right; "
    if known or authorities:
        expected = ", ".join(f"{_kind(one)} {one.get_fingerprint()}" for one in [*known, *authorities])
        what = f"its host key has changed: it shows {shown}, but {access.believed_from} say {expected}"
        hint = f"Somebody may stand in between, or it was installed anew. {check}then replace the line of this host."
        return Trouble(host.name, what, hint, retryable=False)
    what = f"its host key is not known: it shows {shown}, and {access.believed_from} have no line for it"
    hint = (
        f"{check}if that is the same, add the line of {look} to cluster.ssh.known_hosts, the connection or {USER_FILE}."
    )
    return Trouble(host.name, what, hint, retryable=False)


def _kind(key: asyncssh.SSHKey) -> str:
    return key.get_algorithm()


def _denied(host: SshHost, access: SshAccess) -> Trouble:
    user = access.user_of(host)
    named = f"user {user}" if user else "this user"
    keys = "the key given" if access.key else "the keys of the ssh agent and of ~/.ssh"
    hint = (
        "Add the public key to ~/.ssh/authorized_keys there, or give another user or key."
        if access.key
        else "Give a key (in the connection, or MXDIST_SSH_KEY_FILE), or add yours to ~/.ssh/authorized_keys there."
    )
    return Trouble(host.name, f"{named} may not log in with {keys}", hint, retryable=False)


def _slow(host: SshHost, access: SshAccess, witness: Witness, place: str) -> Trouble:
    bound = f"within {access.connect_timeout_s:g} s"
    hint = "Check network and firewall, or raise cluster.ssh.connect_timeout_s."
    if witness.connection is None:
        return Trouble(host.name, f"no answer from {place} {bound}", hint, True)
    if not witness.greeted:
        what = f"{place} takes connections, but sends no banner of an sshd {bound}"
        return Trouble(host.name, what, f"It may be overloaded, or no sshd. {hint}", True)
    return Trouble(host.name, f"its sshd at {place} did not finish the login {bound}", hint, True)


async def forget(connection: asyncssh.SSHClientConnection | None) -> None:
    """Close a connection without waiting long for the other side."""
    if connection is None:
        return
    connection.close()
    try:
        await asyncio.wait_for(connection.wait_closed(), 1.0)
    except (TimeoutError, OSError, asyncssh.Error):
        connection.abort()
