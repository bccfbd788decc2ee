"""Who logs in, with what, and what of it may be seen where. No server is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import asyncssh
import pytest

from mxdist.environment import SUPERVISOR_SECRETS
from mxdist.errors import LaunchError
from mxdist.spec.hosts import Host
from mxdist.spec.platforms import Ssh as SshSpec
from mxdist.ssh import SshAccess
from mxdist.ssh.access import match


@pytest.fixture(scope="module")
def key() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


def text(key: asyncssh.SSHKey, **options: object) -> str:
    return key.export_private_key("openssh", **options).decode()  # type: ignore[arg-type]


def line(key: asyncssh.SSHKey, name: str = "node1") -> str:
    return f"{name} {key.export_public_key().decode().strip()}"


def test_the_environment_says_it_all(key: asyncssh.SSHKey, tmp_path: Path) -> None:
    written = text(key)
    (tmp_path / "key").write_text(written)
    found = SshAccess.from_environment({
        "MXDIST_SSH_USER": "trainer", "MXDIST_SSH_PORT": "2222", "MXDIST_SSH_KEY_FILE": str(tmp_path / "key"),
        "MXDIST_SSH_PASSPHRASE": "p", "MXDIST_SSH_KNOWN_HOSTS": "a\nb\n",
    })  # fmt: skip
    assert found == SshAccess("trainer", 2222, written, "p", ("a", "b"))
    assert SshAccess.from_environment({"MXDIST_SSH_KEY": "k"}).key == "k"
    assert SshAccess.from_environment({}) == SshAccess()


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_a_port_that_is_none_is_told(port: str) -> None:
    with pytest.raises(LaunchError, match="MXDIST_SSH_PORT"):
        SshAccess.from_environment({"MXDIST_SSH_PORT": port})


def test_a_key_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="MXDIST_SSH_KEY_FILE") as caught:
        SshAccess.from_environment({"MXDIST_SSH_KEY_FILE": str(tmp_path / "none")})
    assert not caught.value.retryable


def test_the_host_counts_before_the_job_and_the_job_before_the_connection() -> None:
    access = SshAccess("conn", 1001, known_hosts=("from connection",))
    assert access.for_job(SshSpec()) == access
    known = "node1 ssh-ed25519 AAAA"
    job = access.for_job(SshSpec(user="job", port=1002, known_hosts=(known,), connect_timeout_s=3, connect_attempts=2))
    assert job == SshAccess("job", 1002, known_hosts=(known,), connect_timeout_s=3, connect_attempts=2)
    plain, special = Host("a"), Host("b", None, "own", 1003)
    assert [(job.user_of(host), job.port_of(host)) for host in (plain, special)] == [("job", 1002), ("own", 1003)]
    assert SshAccess().port_of(plain) == 22


def test_what_travels_comes_back(key: asyncssh.SSHKey) -> None:
    access = SshAccess("conn", 2222, text(key), None, (line(key),))
    told = access.secrets()
    assert set(told) <= set(SUPERVISOR_SECRETS)
    assert SshAccess.from_environment(told).with_opener(access.opener()) == access
    assert not set(access.opener()) - {"how", "user", "port"}
    assert SshAccess().secrets() == {}
    assert SshAccess(passphrase="p").secrets() == {}  # of one's own key files: it stays here


def test_a_key_travels_without_its_passphrase(key: asyncssh.SSHKey) -> None:
    told = SshAccess(key=text(key, passphrase="word", rounds=50), passphrase="word").secrets()
    assert "word" not in told.values()
    found = SshAccess.from_environment(told).client_key()
    assert found is not None
    assert found.public_data == key.public_data


def test_secrets_are_not_shown() -> None:
    shown = repr(SshAccess(key="canary-key", passphrase="canary-word"))
    assert "canary" not in shown


@pytest.mark.parametrize("mangle", [str.strip, lambda one: one.replace("\n", "\r\n"), lambda one: f"\n{one}\n\n"])
def test_a_key_may_come_as_forms_leave_it(key: asyncssh.SSHKey, mangle: object) -> None:
    found = SshAccess(key=mangle(text(key))).client_key()  # type: ignore[operator]
    assert found is not None
    assert found.public_data == key.public_data


@pytest.mark.parametrize(
    "wrong", ["", "nonsense", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----"]
)
def test_what_is_no_key_is_told_without_showing_it(wrong: str) -> None:
    with pytest.raises(LaunchError, match="the private key for ssh cannot be read") as caught:
        SshAccess(key=wrong).client_key()
    assert not caught.value.retryable
    assert "AAAA" not in str(caught.value)


def test_a_public_key_instead_of_the_private_one_is_told(key: asyncssh.SSHKey) -> None:
    with pytest.raises(LaunchError, match="whole private key file"):
        SshAccess(key=key.export_public_key().decode()).client_key()


def test_a_passphrase_opens_the_key_and_a_wrong_one_does_not(key: asyncssh.SSHKey) -> None:
    locked = text(key, passphrase="word", rounds=50)
    found = SshAccess(key=locked, passphrase="word").client_key()
    assert found is not None
    with pytest.raises(LaunchError, match="not opened by its passphrase"):
        SshAccess(key=locked, passphrase="other").client_key()
    with pytest.raises(LaunchError, match="needs a passphrase"):
        SshAccess(key=locked).client_key()


def test_lines_that_say_nothing_spoil_no_others(key: asyncssh.SSHKey) -> None:
    lines = ("nonsense", "|1|bad|hash ssh-ed25519 AAAA", "@what node1 ssh-ed25519 AAAA", "# remark", line(key))
    keys, _, _ = match(SshAccess(known_hosts=lines).believed(), "node1", 22)
    assert keys == [key.convert_to_public()]


def test_names_and_ports_are_believed_as_ssh_does(key: asyncssh.SSHKey) -> None:
    def known(written: str, name: str, port: int) -> bool:
        return bool(match(SshAccess(known_hosts=(line(key, written),)).believed(), name, port)[0])

    assert known("node1", "node1", 22)
    assert known("a,node1,b", "node1", 22)
    assert known("node*", "node7", 22)
    assert known("[node1]:2222", "node1", 2222)
    assert known("fd00::1", "fd00::1", 22)
    assert known("[fd00::1]:2222", "fd00::1", 2222)
    assert known("node1", "node1", 2222)
    assert not known("[node1]:2222", "node1", 22)
    assert not known("node1", "node2", 22)
    assert not known("node*,!node7", "node7", 22)


@pytest.mark.parametrize("module", ["mxdist.launch.ssh", "mxdist.runtime.ssh_channel"])
def test_asyncssh_is_loaded_by_who_connects_only(module: str) -> None:
    code = f"import sys, {module}; sys.exit('asyncssh' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
