"""Addresses by device, who reaches whom, and what follows from it."""

from __future__ import annotations

import socket
import subprocess

import pytest

from mxdist.runtime.nics import Address, Listener, addresses, candidates, choose, reach

ETH = Address("eth0", "10.0.0.5", 24)
DOCKER = Address("docker0", "172.17.0.1", 16)
LO = Address("lo", "127.0.0.1", 8)
SIX = Address("eth0", "fd00::5", 64)


def test_addresses_are_those_that_ip_shows() -> None:
    shown = subprocess.run(["ip", "-o", "addr", "show"], capture_output=True, text=True, check=True).stdout
    expected = {
        (words[1].partition("@")[0], words[3].partition("/")[0])
        for words in (line.split() for line in shown.splitlines())
        if not words[3].lower().startswith("fe80:")
    }

    assert {(one.device, one.address) for one in addresses()} == expected
    assert LO in addresses()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [ETH, DOCKER, SIX]),
        ("eth0", [ETH, SIX]),
        ("10.0.0.0/16", [ETH]),
        ("172.17.0.1", [DOCKER]),
        ("lo", [LO]),
        ("ib0", []),
        ("192.168.0.0/16", []),
    ],
)
def test_candidates_are_those_that_were_asked_for(wanted: str | None, expected: list[Address]) -> None:
    assert candidates([LO, SIX, ETH, DOCKER], wanted) == expected


def test_host_that_is_called_by_an_address_has_it() -> None:
    assert candidates([LO], "lo", "127.0.0.7") == [Address("lo", "127.0.0.7", 8)]
    assert candidates([DOCKER, ETH], None, "10.0.0.5") == [ETH, DOCKER]


def test_second_address_of_a_device_must_be_asked_for() -> None:
    second = Address("eth0", "10.0.9.5", 24)

    assert candidates([ETH, second], None) == [ETH]
    assert candidates([ETH, second], "eth0") == [ETH]
    assert candidates([ETH, second], "10.0.9.0/24") == [second]
    assert candidates([ETH, second], None, "10.0.9.5") == [second, ETH]


def test_whoever_listens_is_met_and_nobody_else() -> None:
    listener, other = Listener(["127.0.0.1", "127.0.0.2"]), Listener(["127.0.0.1"])
    try:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            found = reach([
                ("127.0.0.1", listener.ports["127.0.0.1"], listener.word),
                ("127.0.0.2", listener.ports["127.0.0.2"], listener.word),
                ("127.0.0.1", other.ports["127.0.0.1"], listener.word),
                ("127.0.0.1", silent.getsockname()[1], listener.word),
            ], timeout_s=2)  # fmt: skip
        port = listener.ports["127.0.0.1"]
    finally:
        listener.close()
        other.close()

    assert found == [True, True, False, False], "another host at the same address is not the one, nor a deaf one"
    assert reach([("127.0.0.1", port, listener.word)]) == [False]


def test_network_that_all_reach_is_chosen_before_one_that_few_have() -> None:
    own = [[DOCKER, Address("eth0", f"10.0.0.{n}", 24)] for n in (1, 2, 3)]
    needed = [{1, 2}, {0, 2}, {0, 1}]
    reached = {(n, own[n][1].address): needed[n] for n in range(3)}

    assert choose(own, reached, needed) == [addresses[1] for addresses in own]


def test_host_that_one_other_cannot_reach_has_no_address() -> None:
    own = [[ETH], [Address("eth0", "10.0.0.6", 24)]]

    assert choose(own, {(0, "10.0.0.5"): {1}}, [{1}, {0}]) == [ETH, None]


def test_routed_hosts_need_no_common_network() -> None:
    own = [[ETH], [Address("ens3", "10.1.0.6", 24)]]

    assert choose(own, {(0, "10.0.0.5"): {1}, (1, "10.1.0.6"): {0}}, [{1}, {0}]) == [ETH, own[1][0]]
