"""Inventories as people write them, and as people get them wrong."""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxdist.errors import SpecError
from mxdist.spec import parse_job
from mxdist.spec.hosts import MOST_HOSTS, Host, parse_inventory


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("node1", [Host("node1")]),
        ("node1:2", [Host("node1", 2)]),
        ("node1 slots=2", [Host("node1", 2)]),
        ("node1 slots=2 max_slots=4", [Host("node1", 2)]),
        ("node1:2 slots=2", [Host("node1", 2)]),
        ("node1.lab.example.com:8", [Host("node1.lab.example.com", 8)]),
        ("gpu_node-1", [Host("gpu_node-1")]),
        ("trainer@node1:2 port=2222", [Host("node1", 2, "trainer", 2222)]),
        ("  node1\t:", None),
        ("node1:1,node2:3", [Host("node1", 1), Host("node2", 3)]),
        ("node1, node2", [Host("node1"), Host("node2")]),
        ("node1 node2 slots=4", [Host("node1", 4), Host("node2", 4)]),
        ("node[1-3]", [Host("node1"), Host("node2"), Host("node3")]),
        ("node[08-10]:2", [Host("node08", 2), Host("node09", 2), Host("node10", 2)]),
        ("node[01-02,7].lab,other", [Host("node01.lab"), Host("node02.lab"), Host("node7.lab"), Host("other")]),
        ("r[1-2]n[1-2]", [Host("r1n1"), Host("r1n2"), Host("r2n1"), Host("r2n2")]),
        ("10.0.0.[1-2]:4", [Host("10.0.0.1", 4), Host("10.0.0.2", 4)]),
        ("10.0.0.7", [Host("10.0.0.7")]),
        ("fd00::1", [Host("fd00::1")]),
        ("[fd00::1]", [Host("fd00::1")]),
        ("[FD00:0::1]:4 port=22", [Host("fd00::1", 4, None, 22)]),
        ("root@[fe80::1%eth0]:2", [Host("fe80::1%eth0", 2, "root")]),
        ("fe80::1%eth-0.5", [Host("fe80::1%eth-0.5")]),
        ("node1 # the first:2", [Host("node1")]),
        ("node1#2", [Host("node1")]),
        ("# nothing", []),
        ("", []),
        (" \t ", []),
        ("\ufeffnode1", [Host("node1")]),
        ("node1:2\r", [Host("node1", 2)]),
    ],
)
def test_lines(line: str, hosts: list[Host] | None) -> None:
    if hosts is None:
        with pytest.raises(ValueError, match="slots"):
            parse_inventory([line])
    else:
        assert parse_inventory([line]) == tuple(hosts)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("node1:0", "node1 has no slots"),
        ("node1 slots=0", "node1 has no slots"),
        ("node1:-1", "slots must be a whole number"),
        ("node1:two", "slots must be a whole number"),
        ("node1:2.5", "slots must be a whole number"),
        ("node1:²", "slots must be a whole number"),
        ("node1:٣", "slots must be a whole number"),
        ("node1:" + "9" * 5000, "slots must be a whole number"),
        ("node1:999999", "node1 has more than 65536 slots"),
        ("node1:2 slots=3", "node1 is given 2 and 3 slots"),
        ("node1 slots=2 slots=3", "slots is given as 2 and as 3"),
        ("node1:2:3", "'node1:2:3' is no IPv6 address"),
        ("node1 4", "'4' is no host name and no address; slots are written node:2"),
        ("10.0.0.256", "'10.0.0.256' is no host name and no address"),
        ("10.1", "'10.1' is no host name and no address"),
        ("node1 slots = 2", "'=' is no setting; known are slots=, port="),
        ("node1 ansible_host=10.0.0.1", "'ansible_host=10.0.0.1' is no setting"),
        ("node1=2", "'node1=2' is no setting"),
        ("slots=2", "'slots=2' names no host"),
        (",", "',' names no host"),
        ("[workers]", "'workers' is no IPv6 address"),
        ("[fd00::1", "is no IPv6 address"),
        ("[]", "'[]' is no host name"),
        ("node[]", "'node[]' is no host name"),
        ("node[3-1]", "'[3-1]' is no range of numbers"),
        ("node[1-]", "'[1-]' is no range of numbers"),
        ("node[-2]", "'[-2]' is no range of numbers"),
        ("node[1-2-3]", "'[1-2-3]' is no range of numbers"),
        ("node[1,,2]", "'[1,,2]' is no range of numbers"),
        ("node[a-c]", "'node[a-c]' is no host name"),
        ("node[1-3", "'node[1-3' is no host name"),
        ("node1]", "'node1]' is no host name"),
        ("@node1", "'' is no user name"),
        ("a@b@node1", "'a@b' is no user name"),
        ("root@", "'' is no host name"),
        ("-oProxyCommand=id", "is no setting"),
        ("-v", "'-v' is no host name"),
        ("-v@node1", "'-v' is no user name"),
        ("$(id)", "is no host name"),
        ("node1;id", "is no host name"),
        ("node1|id", "is no host name"),
        ("`id`", "is no host name"),
        ("node1\\n", "is no host name"),
        ("node1'", "is no host name"),
        ("../node1", "is no host name"),
        ("node..1", "is no host name"),
        ("nöde", "is no host name"),
        ("node1\0", "is no host name"),
        ("n" * 64, "is no host name"),
        (".".join(["label"] * 60), "is no host name"),
        ("node1 port=0", "0 is no port"),
        ("node1 port=65536", "65536 is no port"),
        ("node1 port=x", "'port=x' is no setting"),
    ],
)
def test_lines_that_say_nothing_sensible(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^line 1: ") as caught:
        parse_inventory([line])
    assert said in str(caught.value)


def test_every_wrong_line_is_told_by_its_number() -> None:
    with pytest.raises(ValueError, match="line 2: .*; line 4: ") as caught:
        parse_inventory(["node1\nnode2:x", "# comment", "$"])
    assert "line 1" not in str(caught.value)
    with pytest.raises(ValueError, match="and 90 more$"):
        parse_inventory(["$"] * 100)


@pytest.mark.parametrize(
    "lines", [["node1", "node1:2"], ["node1,Node1"], ["node[1-2]", "node1"], ["fd00::1", "[FD00:0:0::1]:2"]]
)
def test_a_host_stands_there_once(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="stands there 2 times"):
        parse_inventory(lines)


@pytest.mark.parametrize(
    "lines",
    [
        ["n[0-4096]"],
        ["n[0-999999999]"],
        ["n[0-4095][0-4095]"],
        ["n[0-63][0-63][0-63][0-63]"],
        ["n" + "[1-2]" * 5000],
        ["n[" + "0" * 100_000 + "1-5]"],
        ["n[1-" + "9" * 100_000 + "]"],
        [f"n{number}" for number in range(MOST_HOSTS + 1)],
        ["n[" + ",".join(map(str, range(20_000))) + "]"],
    ],
    ids=range(9),
)
def test_too_many_hosts_are_refused_at_once(lines: list[str]) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"more than|no range") as caught:
        parse_inventory(lines)
    assert time.process_time() - began < 5
    assert len(str(caught.value)) < 500


def test_as_many_as_are_allowed_are_taken() -> None:
    hosts = parse_inventory([f"n[0-{MOST_HOSTS - 1}]:1"])
    assert (len(hosts), hosts[-1]) == (MOST_HOSTS, Host(f"n{MOST_HOSTS - 1}", 1))


_ANY = st.text(st.sampled_from(string.printable + "é²٣\ufeff\u2028\0"), max_size=40)


@given(st.lists(_ANY, max_size=5))
def test_whatever_is_written_gives_sane_hosts_or_a_value_error(lines: list[str]) -> None:
    try:
        hosts = parse_inventory(lines)
    except ValueError:
        return
    for host in hosts:
        assert set(host.name) <= set(string.ascii_letters + string.digits + "._-:%")
        assert not host.name.startswith("-")
        assert host.slots is None or host.slots > 0
        assert host.user is None or not host.user.startswith("-")


def test_a_job_tells_wrong_lines_by_field() -> None:
    cluster = {"kind": "ssh", "hosts": "node1:1\nnode2:0\n"}
    with pytest.raises(SpecError, match=r"cluster\.hosts: line 2: node2 has no slots"):
        parse_job({"name": "x", "script": {"path": "/x.py"}, "cluster": cluster})


def test_hosts_without_slots_take_the_clusters() -> None:
    cluster = {"kind": "ssh", "hosts": ["node1", "node2:3"], "slots": 2}
    job = parse_job({"name": "x", "script": {"path": "/x.py"}, "cluster": cluster, "parallelism": {"world_size": 5}})
    assert [host.slots for host in job.cluster.inventory] == [2, 3]
    assert job.cluster.capacity == 5
