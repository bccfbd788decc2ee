"""A node's sshd, for real: keys only, a host key of its own that stays, and known to the others."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from stack.ports import free_ports
from stack.processes import wait_until
from support.dockerfile import REPOSITORY

USER = pwd.getpwuid(os.getuid()).pw_name


@dataclass(frozen=True)
class Site:
    """Keys and folders that all nodes share, as the compose file has them."""

    folder: Path

    @property
    def key(self) -> Path:
        """The private key that may log in."""
        return self.folder / "key"

    @property
    def known_hosts(self) -> Path:
        """The host keys of all nodes."""
        return self.folder / "known/known_hosts"

    def environment(self, name: str, port: int) -> dict[str, str]:
        """Return what one node is started with."""
        config = self.folder / "sshd_config"
        text = (REPOSITORY / "docker/sshd_config").read_text()
        # In the image the user is called mxdist.
        config.write_text(text.replace("AllowUsers mxdist", f"AllowUsers {USER}"))
        return {
            "PATH": os.environ["PATH"], "MXDIST_NODE_NAME": name, "MXDIST_SSH_PORT": str(port),
            "MXDIST_SSH_STATE": str(self.folder / name), "MXDIST_KNOWN_HOSTS": str(self.known_hosts.parent),
            "MXDIST_AUTHORIZED_KEYS": str(self.key.with_suffix(".pub")), "MXDIST_SSHD_CONFIG": str(config),
        }  # fmt: skip

    @contextmanager
    def node(self, name: str, port: int, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run one node's sshd. StrictModes is off because /tmp is writable by all; root may enter if we are root."""
        more = ["-o", "StrictModes=no", "-o", "ListenAddress=127.0.0.1", "-o", "PermitRootLogin=prohibit-password"]
        # The first word of an option counts, so it has to come before the configuration's own.
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [str(REPOSITORY / "docker/node-sshd"), *more]
            environment = self.environment(name, port) | variables
            server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            assert wait_until(lambda: bool(self.scan(port)), 60), (self.folder / f"{name}.log").read_text()
            yield server
        finally:
            server.terminate()
            server.wait(30)

    def scan(self, port: int) -> str:
        """Return the host key that answers at a port."""
        command = ["ssh-keyscan", "-T", "5", "-t", "ed25519,ecdsa", "-p", str(port), "127.0.0.1"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition(" ")[2]

    def ssh(self, name: str, port: int, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, which is verified under its own name; the first value of an option counts."""
        command = [*self.words(name, port, *options), "echo", "done"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def words(self, name: str, port: int, *options: str) -> list[str]:
        """Return the beginning of such a command."""
        fixed = ["-F", "none", "-p", str(port), "-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "BatchMode=yes"]
        verified = ["-o", f"HostKeyAlias=[{name}]:{port}", "-o", "StrictHostKeyChecking=yes"]
        return ["ssh", *options, *fixed, *verified, f"{USER}@127.0.0.1"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", made.key], check=True)
    if os.getuid() == 0:  # as root, sshd wants this; in the image it does not run as root
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return made


def test_nodes_let_the_key_in_and_are_known(site: Site) -> None:
    first, second = free_ports(2)
    with site.node("node1", first), site.node("node2", second):
        for name, port in (("node1", first), ("node2", second)):
            done = site.ssh(name, port, "-i", str(site.key))
            assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert site.ssh("node2", first, "-i", str(site.key)).returncode == 255  # node2's key is another
        assert len(site.known_hosts.read_text().splitlines()) == 2


def test_a_node_lets_in_neither_passwords_nor_other_keys(site: Site) -> None:
    (port,) = free_ports(1)
    other = site.folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    with site.node("node1", port):
        assert "(publickey)" in site.ssh("node1", port, "-i", str(other), "-o", "IdentitiesOnly=yes").stderr
        refused = site.ssh("node1", port, "-o", "PreferredAuthentications=password,keyboard-interactive")
        assert "(publickey)" in refused.stderr


def test_a_node_keeps_its_host_key(site: Site) -> None:
    (port,) = free_ports(1)
    with site.node("node1", port):
        key = site.scan(port)
    with site.node("node1", port):
        assert site.scan(port) == key
    assert len(site.known_hosts.read_text().splitlines()) == 1
    assert (site.folder / "node1/host_key").stat().st_mode & 0o77 == 0


def test_a_worker_of_an_mpijob_shows_the_jobs_own_key(site: Site) -> None:
    (port,) = free_ports(1)
    pair = site.folder / "pair"  # as the operator makes and mounts it
    pair.mkdir()
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", pair / "id_rsa"]
    subprocess.run(make, check=True)
    (pair / "id_rsa").chmod(0o600)
    known = site.folder / "of_the_launcher"
    known.write_text(f"* {' '.join((pair / 'id_rsa.pub').read_text().split()[:2])}\n")
    with site.node("worker", port, MXDIST_SSH_PAIR=str(pair)):
        only = ["-o", f"UserKnownHostsFile={known}", "-o", "IdentitiesOnly=yes"]
        done = site.ssh("worker", port, *only, "-i", str(pair / "id_rsa"))
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert "(publickey)" in site.ssh("worker", port, *only, "-i", str(site.key)).stderr  # of the site, not the job
        known.write_text(f"* {' '.join(site.key.with_suffix('.pub').read_text().split()[:2])}\n")
        assert site.ssh("worker", port, *only, "-i", str(pair / "id_rsa")).returncode == 255
    assert (site.folder / "worker/host_key").stat().st_mode & 0o77 == 0
    assert not site.known_hosts.exists()


def test_a_worker_ends_after_what_runs_on_it(site: Site, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    pair, flag = site.folder / "pair", tmp_path / "go"
    pair.mkdir()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", pair / "id_rsa"], check=True
    )
    site.known_hosts.parent.mkdir()
    site.known_hosts.write_text(f"* {' '.join((pair / 'id_rsa.pub').read_text().split()[:2])}\n")
    with site.node("worker", port, MXDIST_SSH_PAIR=str(pair)) as worker:
        words = site.words("worker", port, "-i", str(pair / "id_rsa"))
        command = f"echo begun; until [ -e {flag} ]; do sleep 0.1; done; echo done"
        session = subprocess.Popen([*words, command], text=True, stdout=subprocess.PIPE)
        assert session.stdout is not None
        assert session.stdout.readline() == "begun\n"
        worker.terminate()  # as the kubelet does
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(1)
        flag.touch()
        assert session.communicate(timeout=60)[0] == "done\n"
        assert worker.wait(60) == 0
        assert site.scan(port) == ""


def test_a_node_that_nobody_could_enter_does_not_start(site: Site) -> None:
    site.key.with_suffix(".pub").write_text("")
    command = [str(REPOSITORY / "docker/node-sshd")]
    done = subprocess.run(command, env=site.environment("node1", 1), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nobody could log in" in done.stderr


def test_sshd_is_there() -> None:
    assert shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin"), "install openssh-server"
