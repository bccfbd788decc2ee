"""What is said of hosts that answer wrongly, or not at all. The servers here are plain sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from mxdist.errors import LaunchError
from mxdist.spec.hosts import Host
from mxdist.ssh import Ssh, SshAccess
from stack.ports import free_ports


@contextmanager
def server(serve: Callable[[socket.socket], None], address: str = "127.0.0.1") -> Iterator[tuple[Host, list[float]]]:
    """Accept connections, treat each as told, and note when they came."""
    came: list[float] = []
    with ExitStack() as kept, socket.create_server((address, 0)) as listening:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                came.append(time.monotonic())
                kept.enter_context(connection)
                serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield Host(address, port=listening.getsockname()[1]), came
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def refusal(*hosts: Host, timeout_s: float = 60, attempts: int = 1) -> LaunchError:
    access = SshAccess("nobody", connect_timeout_s=timeout_s, connect_attempts=attempts, known_hosts=("x ssh-rsa A",))
    with Ssh(access) as ssh, pytest.raises(LaunchError) as caught:
        ssh.connect(hosts)
    return caught.value


def test_a_connection_that_closes_before_the_banner_names_max_startups() -> None:
    with server(socket.socket.close) as (host, came):
        said = refusal(host, attempts=3)
    assert "closed the connection before its banner" in said.message
    assert "MaxStartups" in said.hint
    assert said.retryable
    assert len(came) == 3


def test_words_before_the_end_are_no_banner() -> None:
    """So does an sshd from 8.5 on say why it drops a connection."""

    def drop(connection: socket.socket) -> None:
        connection.sendall(b"Exceeded MaxStartups\r\n")
        connection.close()

    with server(drop) as (host, _):
        assert "MaxStartups" in refusal(host).hint


def test_pauses_between_attempts_grow() -> None:
    with server(socket.socket.close) as (host, came):
        refusal(host, attempts=5)
    pauses = [later - earlier for earlier, later in zip(came, came[1:], strict=False)]
    # The pauses are 0.4, 0.8, 1.6, 3.2 s, each by chance from half of it to half as much again.
    assert [pause >= bound for pause, bound in zip(pauses, (0.2, 0.4, 0.8, 1.6), strict=True)] == [True] * 4


def test_a_server_that_is_silent_is_given_up_in_time() -> None:
    with server(lambda connection: None) as (host, _):
        began = time.monotonic()
        said = refusal(host, timeout_s=0.5)
    assert "sends no banner of an sshd within 0.5 s" in said.message
    assert said.retryable
    assert time.monotonic() - began < 20


def test_a_server_that_greets_and_then_hangs_is_given_up() -> None:
    with server(lambda connection: connection.sendall(b"SSH-2.0-slow\r\n")) as (host, _):
        said = refusal(host, timeout_s=0.5)
    assert "did not finish the login within 0.5 s" in said.message


@pytest.mark.parametrize("greeting", [b"SSH-1.5-old\r\n", b"x" * 20_000 + b"\r\n", b"line\r\n" * 5000])
def test_a_server_that_is_no_sshd_is_told(greeting: bytes) -> None:
    with server(lambda connection: connection.sendall(greeting)) as (host, came):
        said = refusal(host, attempts=3)
    assert "is no sshd" in said.message
    assert not said.retryable
    assert len(came) == 1


def test_a_name_that_does_not_resolve_and_a_closed_port_are_told_together() -> None:
    (port,) = free_ports(1)
    said = refusal(Host("no-such-host.invalid"), Host("127.0.0.1", port=port))
    first, *lines = said.message.splitlines()
    assert first == "cannot reach 2 hosts:"
    assert lines[0].startswith("  no-such-host.invalid: its name does not resolve")
    assert lines[1] == f"  127.0.0.1: nothing listens at port {port} (connection refused)"
    assert "cluster.hosts" in said.hint


def test_silent_hosts_cost_one_time_not_many() -> None:
    with ExitStack() as stack:
        silent = [server(lambda connection: None, f"127.0.0.{number}") for number in range(1, 17)]
        hosts = [stack.enter_context(one)[0] for one in silent]
        began = time.monotonic()
        said = refusal(*hosts, timeout_s=2)
        assert time.monotonic() - began < 20
    assert said.message.startswith("cannot reach 16 hosts:")
