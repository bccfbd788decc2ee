"""Connections against a real sshd: who is let in, who is believed, and what is said when it fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mxdist.errors import LaunchError
from mxdist.launch.hosts import HostPlan
from mxdist.runtime.ssh_channel import SshOpener
from mxdist.spec.hosts import Host
from mxdist.ssh import Ssh, SshAccess
from stack.ports import free_ports
from stack.processes import wait_until
from support.sshd import Sshd, fingerprint, keygen, sshd

CANARY = "canary-5f1d0c"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as running:
        yield running


def access(server: Sshd, **changes: object) -> SshAccess:
    found = SshAccess(key=server.key.read_text(), known_hosts=(server.known_host,), connect_timeout_s=20)
    return replace(found, **changes)  # type: ignore[arg-type]


def refusal(server: Sshd, wanted: SshAccess) -> LaunchError:
    with Ssh(wanted) as ssh, pytest.raises(LaunchError) as caught:
        ssh.connect([server.host])
    return caught.value


def logins(server: Sshd) -> int:
    return server.log.read_text().count("Accepted publickey")


def test_a_command_gets_its_input_and_returns_what_it_says(server: Sshd) -> None:
    with Ssh(access(server)) as ssh:
        done = ssh.run(server.host, ["sh", "-c", "cat; echo bad >&2; exit 3"], stdin=b"a\0b\n", timeout_s=60)
        assert (done.returncode, done.stdout, done.last_words) == (3, b"a\0b\n", "bad")
        assert ssh.run(server.host, ["sh", "-c", "kill -9 $$"], timeout_s=60).returncode == -9


def test_words_reach_the_command_as_they_are(server: Sshd) -> None:
    words = ["a b", "$HOME", "`id`", "'", '"', ";", "*", "\\", ""]
    with Ssh(access(server)) as ssh:
        done = ssh.run(server.host, ["printf", "%s|", *words], timeout_s=60)
    assert done.stdout.decode() == "".join(f"{word}|" for word in words)


def test_all_commands_share_one_connection(server: Sshd) -> None:
    with Ssh(access(server)) as ssh:
        threads = [
            threading.Thread(target=ssh.run, args=(server.host, ["true"]), kwargs={"timeout_s": 60}) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with ssh.open(server.host, ["true"]) as process:
            process.wait(60)
    assert logins(server) == 1


def test_a_connection_that_died_is_made_anew(server: Sshd) -> None:
    with Ssh(access(server)) as ssh:
        session = int(ssh.run(server.host, ["sh", "-c", "echo $PPID"], timeout_s=60).stdout)
        assert b"notty" in Path(f"/proc/{session}/cmdline").read_bytes()  # sshd's own process for this connection
        os.kill(session, signal.SIGKILL)
        assert ssh.run(server.host, ["echo", "again"], timeout_s=60).stdout == b"again\n"
    assert logins(server) == 2


def test_an_unknown_host_key_is_told_with_its_fingerprint(server: Sshd) -> None:
    other = server.known_host.replace(str(server.port), "1")
    said = refusal(server, access(server, known_hosts=(other,)))
    assert "its host key is not known" in said.message
    assert fingerprint(server.host_key.with_suffix(".pub")) in said.message
    assert "cluster.ssh.known_hosts" in said.hint
    assert not said.retryable


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_changed_host_key_is_told_with_both_fingerprints(server: Sshd, tmp_path: Path, kind: str) -> None:
    public = keygen(tmp_path / "other", kind=kind).with_suffix(".pub")
    line = f"[127.0.0.1]:{server.port} {public.read_text()}"
    said = refusal(server, access(server, known_hosts=(line,)))
    assert "its host key has changed" in said.message
    assert fingerprint(server.host_key.with_suffix(".pub")) in said.message
    assert fingerprint(public) in said.message
    assert not said.retryable


def test_a_revoked_host_key_is_not_good(server: Sshd) -> None:
    said = refusal(server, access(server, known_hosts=(server.known_host, f"@revoked {server.known_host}")))
    assert "revoked" in said.message


def test_the_known_address_of_one_host_does_not_vouch_for_another_name(server: Sshd) -> None:
    host = replace(server.host, name="localhost")
    with Ssh(access(server)) as ssh, pytest.raises(LaunchError, match="localhost: its host key is not known"):
        ssh.connect([host])


def test_hashed_lines_and_certificates_of_a_known_authority_are_believed(server: Sshd, tmp_path: Path) -> None:
    hashed = tmp_path / "known_hosts"
    hashed.write_text(f"{server.known_host}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", hashed], check=True, capture_output=True)
    with Ssh(access(server, known_hosts=tuple(hashed.read_text().splitlines()))) as ssh:
        ssh.connect([server.host])
    authority, folder = keygen(tmp_path / "authority"), tmp_path / "certified"
    certificate = f"HostCertificate {folder}/host_key-cert.pub"
    with sshd(folder, options=[certificate], sign_with=authority, key=server.key) as certified:
        line = f"@cert-authority * {authority.with_suffix('.pub').read_text()}"
        with Ssh(access(certified, known_hosts=(line,))) as ssh:
            ssh.connect([certified.host])


def test_the_users_own_known_hosts_count_when_none_are_given_and_are_never_written(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "~/.ssh/known_hosts" in str(refusal(server, access(server, known_hosts=())))
    assert not (tmp_path / ".ssh").exists()
    own = tmp_path / ".ssh/known_hosts"
    own.parent.mkdir()
    own.write_text(f"# mine\nnonsense\n{server.known_host}\n")
    before = own.read_bytes()
    with Ssh(access(server, known_hosts=())) as ssh:
        ssh.connect([server.host])
    assert own.read_bytes() == before
    told = access(server, known_hosts=()).secrets([server.host])  # so does a supervisor on another host
    assert told["MXDIST_SSH_KNOWN_HOSTS"] == server.known_host


def test_a_key_with_a_passphrase_logs_in(tmp_path: Path) -> None:
    key = keygen(tmp_path / "locked", passphrase="open sesame")
    with sshd(tmp_path / "sshd", key=key) as server:
        with Ssh(access(server, passphrase="open sesame")) as ssh:
            ssh.connect([server.host])
        with pytest.raises(LaunchError, match="MXDIST_SSH_PASSPHRASE") as caught:
            Ssh(access(server))
        assert not caught.value.retryable
        with pytest.raises(LaunchError, match="passphrase"):
            Ssh(access(server, passphrase="wrong"))


def test_without_a_key_the_ssh_agent_and_then_the_users_files_are_asked(
    server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    said = refusal(server, access(server, key=None))
    assert "may not log in with the keys of the ssh agent and of ~/.ssh" in said.message
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL)
    try:
        assert wait_until((tmp_path / "agent").exists, 30)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        subprocess.run(["ssh-add", "-q", server.key], check=True)
        with Ssh(access(server, key=None)) as ssh:
            ssh.connect([server.host])
    finally:
        agent.terminate()
        agent.wait(30)
    monkeypatch.delenv("SSH_AUTH_SOCK")
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519").write_text(server.key.read_text())
    (tmp_path / ".ssh/config").write_text("Host *\n  Port 1\n  User nobody\n")  # must not matter
    with Ssh(access(server, key=None)) as ssh:
        ssh.connect([server.host])


def test_a_key_that_may_not_enter_is_told_once(server: Sshd, tmp_path: Path) -> None:
    stranger = keygen(tmp_path / "stranger").read_text()
    said = refusal(server, access(server, key=stranger))
    assert f"user {server.host.user} may not log in with the key given" in said.message
    assert not said.retryable
    assert server.log.read_text().count("Connection from") == 1  # trying again would not help


def test_every_host_that_cannot_be_reached_is_told_at_once(server: Sshd, tmp_path: Path) -> None:
    (closed,) = free_ports(1)
    stranger = replace(server.host, name="localhost")
    hosts = [server.host, Host("127.0.0.2", None, None, closed), Host("no-such-host.invalid"), stranger]
    with Ssh(access(server, connect_attempts=2)) as ssh, pytest.raises(LaunchError) as caught:
        ssh.connect(hosts)
    said = caught.value.message.splitlines()
    assert said[0] == "cannot reach 3 of 4 hosts:"
    assert [line.split(":")[0].strip() for line in said[1:]] == ["127.0.0.2", "no-such-host.invalid", "localhost"]
    assert "connection refused" in said[1]
    assert "does not resolve" in said[2]
    assert "host key is not known" in said[3]


def test_a_refusal_is_tried_again(tmp_path: Path) -> None:
    key, (port,) = keygen(tmp_path / "key"), free_ports(1)
    wanted = SshAccess(key=key.read_text(), connect_attempts=60, connect_timeout_s=20)
    failed: list[LaunchError] = []
    with Ssh(wanted) as ssh:

        def connect() -> None:
            try:
                ssh.connect([Host("127.0.0.1", port=port)])
            except LaunchError as error:
                failed.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        time.sleep(0.2)  # the first attempt meets a closed port, or the test proves less
        with sshd(tmp_path / "late", key=key, port=port):
            thread.join(120)
    assert "host key is not known" in failed[0].message  # so it came through to the sshd that started late


def test_max_startups_is_named_when_sshd_drops_connections(tmp_path: Path) -> None:
    with sshd(tmp_path / "sshd", options=["MaxStartups 1:100:1", "LoginGraceTime 60"]) as server:
        with socket.create_connection((server.address, server.port)) as held:  # logs in for ever
            assert held.recv(100).startswith(b"SSH-2.0")
            said = refusal(server, access(server, connect_attempts=2))
        assert "closed the connection before its banner" in said.message
        assert "MaxStartups" in said.hint
        assert said.retryable
        with Ssh(access(server)) as ssh:
            ssh.connect([server.host])


def test_many_at_once_come_through_an_sshd_that_takes_few(tmp_path: Path) -> None:
    with sshd(tmp_path / "sshd", options=["MaxStartups 2:50:4"]) as server:
        failed: list[Exception] = []

        def submit() -> None:
            try:
                with Ssh(access(server, connect_attempts=12)) as ssh:
                    ssh.run(server.host, ["true"], timeout_s=120)
            except LaunchError as error:
                failed.append(error)

        threads = [threading.Thread(target=submit) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_no_secret_is_on_any_command_line(server: Sshd) -> None:
    show = "cat >/dev/null; for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done"
    with Ssh(access(server, key=server.key.read_text())) as ssh:
        seen = ssh.run(server.host, ["sh", "-c", show], stdin=CANARY.encode(), timeout_s=60).stdout.decode()
        environment = ssh.run(server.host, ["env"], timeout_s=60).stdout.decode()
    assert "sshd" in seen
    assert CANARY not in seen
    assert "PRIVATE KEY" not in seen
    assert "MXDIST" not in environment


def test_a_command_that_hangs_is_given_up(server: Sshd) -> None:
    with Ssh(access(server)) as ssh:
        with pytest.raises(LaunchError, match="has not ended within 0.5 s"):
            ssh.run(server.host, ["sleep", "60"], timeout_s=0.5)
        assert ssh.run(server.host, ["echo", "on"], timeout_s=60).stdout == b"on\n"


def test_a_running_command_talks_both_ways_and_ends_with_its_input(server: Sshd) -> None:
    talk = ["sh", "-c", "while read x; do echo got $x; done; echo bye >&2; exit 7"]
    with Ssh(access(server)) as ssh, ssh.open(server.host, talk) as process:
        process.stdin.write(b"one\n")
        assert process.stdout.readline() == b"got one\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(60) == 7
        assert process.stdout.read() == b""
        assert process.stderr_tail() == "bye"


def test_much_output_that_nobody_reads_waits_and_is_whole(server: Sshd) -> None:
    size = 32 << 20
    with Ssh(access(server)) as ssh, ssh.open(server.host, ["head", "-c", str(size), "/dev/zero"]) as process:
        other = ssh.run(server.host, ["echo", "free"], timeout_s=60)  # the connection is not blocked by it
        assert other.stdout == b"free\n"
        got = 0
        while chunk := process.stdout.read(1 << 20):
            got += len(chunk)
        assert got == size
        assert process.wait(60) == 0


def test_closing_ends_what_runs(server: Sshd) -> None:
    with Ssh(access(server)) as ssh:
        process = ssh.open(server.host, ["cat"])
    with process:
        assert process.wait(60) == 255
        assert process.stdout.read() == b""


def test_an_opener_names_every_host_and_tries_again_later(server: Sshd) -> None:
    closed, other = free_ports(2)
    good = HostPlan("127.0.0.1", 1, server.host.user, server.port)
    bad = [HostPlan("127.0.0.2", 1, None, closed), HostPlan("127.0.0.3", 1, None, other)]
    opener = SshOpener(access(server, connect_attempts=1), [good, *bad])
    for host in bad:
        with pytest.raises(LaunchError, match="cannot reach 2 of 3 hosts"):
            opener.open(host, ["true"])
    with pytest.raises(LaunchError, match=r"^cannot reach 127\.0\.0\.3: nothing listens"):
        opener.open(bad[1], ["true"])
    channel = opener.open(good, ["sh", "-c", "echo one; cat; echo sorry >&2; exit 4"])
    channel.send(b"two\n")
    lines = channel.lines()
    assert [next(lines), next(lines)] == [b"one", b"two"]
    channel.close()
    assert wait_until(lambda: channel.returncode == 4, 60)
    assert channel.complaint() == "sorry"
    assert list(lines) == []
    opener.close()


def test_ipv6_and_a_user_of_the_hosts_own(tmp_path: Path) -> None:
    with sshd(tmp_path / "sshd", address="::1") as server, Ssh(access(server, user="nobody-here", port=1)) as ssh:
        assert ssh.run(server.host, ["echo", "six"], timeout_s=60).stdout == b"six\n"
