"""Who logs in to which hosts, with what key, and which host keys are believed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mxdist.errors import LaunchError

if TYPE_CHECKING:
    from asyncssh import SSHKey, SSHKnownHosts

    from mxdist.spec.platforms import Ssh

DEFAULT_PORT = 22
USER_FILE = Path("~/.ssh/known_hosts")
SYSTEM_FILE = Path("/etc/ssh/ssh_known_hosts")


class SshHost(Protocol):
    """A host as an inventory or a plan names it; None: as the access says."""

    @property
    def name(self) -> str:
        """A name or an address."""

    @property
    def user(self) -> str | None:
        """Who to log in as."""

    @property
    def port(self) -> int | None:
        """Of sshd."""


@dataclass(frozen=True)
class SshAccess:
    """How hosts are reached; a host that says otherwise is right.

    :param user: who to log in as; None: the user of this process.
    :param key: a private key (its text); None: the user's ssh agent and own key files.
    :param passphrase: of the key.
    :param known_hosts: lines of a known_hosts file; empty: those of the user and of the system.
    :param connect_timeout_s: for one attempt, from the first packet to the login.
    """

    user: str | None = None
    port: int | None = None
    key: str | None = field(default=None, repr=False)
    passphrase: str | None = field(default=None, repr=False)
    known_hosts: tuple[str, ...] = ()
    connect_timeout_s: float = 10.0
    connect_attempts: int = 4

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> SshAccess:
        """Return what MXDIST_SSH_KEY (or _KEY_FILE), _PASSPHRASE, _KNOWN_HOSTS, _USER and _PORT say.

        :raises LaunchError: the key's file cannot be read, or the port is none.
        """
        get = environment.get
        return cls(
            user=get("MXDIST_SSH_USER") or None,
            port=_port(get("MXDIST_SSH_PORT")),
            key=get("MXDIST_SSH_KEY") or _read(get("MXDIST_SSH_KEY_FILE")),
            passphrase=get("MXDIST_SSH_PASSPHRASE") or None,
            known_hosts=tuple((get("MXDIST_SSH_KNOWN_HOSTS") or "").splitlines()),
        )

    def for_job(self, ssh: Ssh) -> SshAccess:
        """Return this access with what a job says of its own."""
        return replace(
            self,
            user=ssh.user or self.user,
            port=ssh.port or self.port,
            known_hosts=ssh.known_hosts or self.known_hosts,
            connect_timeout_s=ssh.connect_timeout_s,
            connect_attempts=ssh.connect_attempts,
        )

    def secrets(self, hosts: Iterable[SshHost] = ()) -> dict[str, str]:
        """Return what a supervisor needs to log in as this process does, by names of ``SUPERVISOR_SECRETS``.

        A key travels opened: its passphrase stays here, and the other side needs no bcrypt.

        :param hosts: those whose keys it has to know; without lines of its own, this access looks them up here.
        """
        lines = self.known_hosts or tuple(self._known_here(hosts))
        named = {
            "MXDIST_SSH_KEY": self._opened(),
            "MXDIST_SSH_KNOWN_HOSTS": "\n".join(lines),
        }
        return {name: value for name, value in named.items() if value}

    def opener(self) -> dict[str, Any]:
        """Return what else it is told: ``opener`` of its document."""
        return {"how": "ssh", "user": self.user, "port": self.port}

    def with_opener(self, told: Mapping[str, Any]) -> SshAccess:
        """Return this access with what ``opener`` says."""
        return replace(self, user=told.get("user") or self.user, port=told.get("port") or self.port)

    def port_of(self, host: SshHost) -> int:
        """Return where the host's sshd listens."""
        return host.port or self.port or DEFAULT_PORT

    def user_of(self, host: SshHost) -> str | None:
        """Return who to log in as."""
        return host.user or self.user

    def client_key(self) -> SSHKey | None:
        """Return the private key, decrypted: once, for that takes a while.

        :raises LaunchError: it is no key, or the passphrase does not fit.
        """
        if self.key is None:
            return None
        import asyncssh

        text = self.key.replace("\r\n", "\n").strip() + "\n"  # as forms and variables leave it
        try:
            return asyncssh.import_private_key(text, self.passphrase)
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError, ValueError) as error:
            if self.passphrase:
                what, hint = "is not opened by its passphrase", "Check MXDIST_SSH_PASSPHRASE, or the connection's."
            elif "passphrase" in str(error).lower():
                what, hint = "needs a passphrase", "Give it as MXDIST_SSH_PASSPHRASE, or in the connection."
            else:
                what, hint = "cannot be read", "It has to be a whole private key file, with its line breaks."
            raise LaunchError(f"the private key for ssh {what} ({error}).", hint=hint, retryable=False) from None

    def believed(self) -> SSHKnownHosts:
        """Return the host keys that are believed. Lines that say nothing are passed over, as ssh does."""
        import asyncssh

        known = asyncssh.import_known_hosts("")
        for line in self.known_hosts or _user_lines():
            try:
                known.load(line)
            except ValueError:
                continue
        return known

    @property
    def believed_from(self) -> str:
        """Where the believed host keys stand, for a reader."""
        return "the known_hosts lines given" if self.known_hosts else f"{USER_FILE} and {SYSTEM_FILE}"

    def _opened(self) -> str | None:
        key = self.client_key() if self.passphrase else None
        return key.export_private_key("openssh").decode() if key else self.key

    def _known_here(self, hosts: Iterable[SshHost]) -> Iterator[str]:
        wanted = list(hosts)
        if not wanted:
            return
        known = self.believed()
        for host in wanted:
            port = self.port_of(host)
            name = host.name if port == DEFAULT_PORT else f"[{host.name}]:{port}"
            keys, authorities, revoked = match(known, host.name, port)
            for marker, found in (("", keys), ("@cert-authority ", authorities), ("@revoked ", revoked)):
                for key in found:
                    yield f"{marker}{name} {key.export_public_key().decode().strip()}"


def match(known: SSHKnownHosts, name: str, port: int) -> tuple[list[SSHKey], list[SSHKey], list[SSHKey]]:
    """Return the believed keys of a host, those of its authorities, and revoked ones.

    The name alone counts. An address that is known does not make its key good for every name that leads to it.
    """
    keys, authorities, revoked, *_ = known.match(name, "", port if port != DEFAULT_PORT else None)
    return list(keys), list(authorities), list(revoked)


def _user_lines() -> Iterator[str]:
    for path in (USER_FILE.expanduser(), SYSTEM_FILE):
        try:
            yield from path.read_text(errors="replace").splitlines()
        except OSError:
            continue


def _port(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise LaunchError(f"MXDIST_SSH_PORT is {text!r}, which is no port.", retryable=False)
    return int(text)


def _read(path: str | None) -> str | None:
    if not path:
        return None
    try:
        return Path(path).expanduser().read_text()
    except (OSError, ValueError) as error:
        hint = "Check MXDIST_SSH_KEY_FILE."
        raise LaunchError(f"the private key for ssh cannot be read: {error}", hint=hint, retryable=False) from error
