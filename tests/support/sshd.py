"""A real sshd on loopback, with a host key of its own; no rights of root are needed."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mxdist.spec.hosts import Host
from stack.ports import free_ports
from stack.processes import wait_until

_CONFIG = """\
AuthenticationMethods publickey
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PermitUserEnvironment no
PrintMotd no
PidFile none
LogLevel VERBOSE
"""


def keygen(path: Path, *, passphrase: str = "", kind: str = "ed25519") -> Path:
    """Make a key pair; return the private key's file."""
    path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", path], check=True)
    return path


def fingerprint(public: Path) -> str:
    """Return what ssh-keygen prints of a public key: ``SHA256:...``."""
    done = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


@dataclass(frozen=True)
class Sshd:
    """A running sshd.

    :param key: the private key that it lets in.
    :param host_key: its own private key.
    """

    address: str
    port: int
    key: Path
    host_key: Path
    log: Path

    @property
    def host(self) -> Host:
        """The host as an inventory names it."""
        return Host(self.address, None, getpass.getuser(), self.port)

    @property
    def known_host(self) -> str:
        """Its line in a known_hosts file."""
        public = self.host_key.with_suffix(".pub").read_text()
        return f"[{self.address}]:{self.port} {' '.join(public.split()[:2])}"


@contextmanager
def sshd(
    folder: Path,
    *,
    options: Sequence[str] = (),
    key: Path | None = None,
    address: str = "127.0.0.1",
    port: int | None = None,
    sign_with: Path | None = None,
) -> Iterator[Sshd]:
    """Run an sshd in ``folder`` until the end of the block.

    :param options: lines of its configuration, which count before ours.
    :param key: whose owner may log in; default: a new one.
    :param sign_with: the private key of an authority that signs the host key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:  # as root, sshd wants this
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    key, host_key = key or keygen(folder / "key"), keygen(folder / "host_key")
    if sign_with is not None:
        public = host_key.with_suffix(".pub")
        subprocess.run(["ssh-keygen", "-q", "-s", sign_with, "-h", "-I", "host", "-n", address, public], check=True)
    port = port or free_ports(1)[0]
    config, log = folder / "sshd_config", folder / "sshd.log"
    own = [f"Port {port}", f"ListenAddress {address}", f"HostKey {host_key}", f"AuthorizedKeysFile {key}.pub"]
    config.write_text("\n".join([*options, *own, _CONFIG]))
    command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
    with log.open("ab") as out:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        assert wait_until(lambda: b"Server listening" in log.read_bytes() or server.poll() is not None, 60)
        assert server.poll() is None, log.read_text()
        yield Sshd(address, port, key, host_key, log)
    finally:
        server.terminate()
        server.wait(30)
