"""The nodes are what the other tests take them for: apart from each other and from this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stack.processes import ServiceError, wait_until
from stack.seaweed import Seaweed
from support import node as node_module
from support import nodes as nodes_module
from support.node import USER, Node
from support.nodes import Nodes
from support.places import REPOSITORY, node_python


def ssh(nodes: Nodes, node: Node, *command: str, user: str = USER) -> subprocess.CompletedProcess[str]:
    known = nodes.folder / "known_hosts"
    known.write_text("\n".join(nodes.known_hosts) + "\n")
    options = ["-F", "none", "-i", str(nodes.key), "-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes"]
    words = ["ssh", *options, "-o", "ConnectTimeout=5", f"{user}@{node.address}", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def reaches(node: Node, address: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(({address!r}, {port}), 2)"
    return node.exec([node.python, "-c", code], check=False).returncode == 0


def answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), 2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def test_a_node_has_the_environment_and_nothing_else_of_the_machine(nodes: Nodes) -> None:
    code = "import sys, mxnet, horovod.mxnet; print(mxnet.__version__, sys.prefix)"
    assert nodes[0].exec([nodes[0].python, "-c", code]).stdout.split() == ["1.9.1", "/opt/node"]
    hidden = [
        REPOSITORY,
        node_python().parents[1],
        nodes.folder,
        Path.home() / ".cache",
        Path("/mnt"),
        Path("/home/user"),
    ]
    seen = "".join(f"[ -e {place} ] && echo {place};" for place in hidden)
    assert nodes[0].exec(["sh", "-c", f"{seen} true"]).stdout == ""
    assert nodes[0].exec(["touch", "/opt/node/lib/x"], check=False).returncode != 0
    assert nodes[0].exec(["touch", "/usr/x"], check=False).returncode != 0


def test_nodes_see_neither_files_nor_processes_of_each_other(nodes: Nodes) -> None:
    first, second = nodes[0], nodes[1]
    first.exec(["touch", "/tmp/mine"])
    assert second.exec(["ls", "/tmp"]).stdout == ""
    with first.popen(["sleep", "1000"]) as sleeper:
        assert wait_until(lambda: [one.command for one in first.processes()] == [("sleep", "1000")], 10)
        assert "sleep 1000" in first.exec(["ps", "ax"]).stdout
        assert "sleep 1000" not in second.exec(["ps", "ax"]).stdout
        assert second.processes() == []
        sleeper.kill()
    assert wait_until(lambda: first.processes() == [], 10)


def test_every_node_has_its_name_address_and_host_key(nodes: Nodes) -> None:
    for node in nodes:
        assert ssh(nodes, node, "hostname", "-f").stdout == f"{node.name}\n"
        assert ssh(nodes, node, "id", "-un", user="root").stdout == "root\n"
        assert all(reaches(node, other.name, 22) for other in nodes)
    assert len({node.host_key for node in nodes}) == len(nodes)


def test_a_changed_host_key_is_refused(nodes: Nodes) -> None:
    node = nodes[1]
    before = node.host_key
    known = nodes.known_hosts
    node.new_host_key()
    node.restart_sshd()
    assert node.host_key != before
    assert node.host_key not in "\n".join(known)
    assert ssh(nodes, node, "true").returncode == 0  # who learns the new key gets in


def test_a_stopped_sshd_refuses(nodes: Nodes) -> None:
    nodes[0].stop_sshd()
    assert not nodes[0].greets()
    nodes[0].start_sshd("MaxStartups 1:100:1")
    assert ssh(nodes, nodes[0], "true").returncode == 0
    nodes.restore()  # else the next test that logs in five times at once finds three of them dropped
    assert "maxstartups 10:30:100" in nodes[0].exec(["/usr/sbin/sshd", "-T"]).stdout.lower()


def test_a_cut_cable_is_silent_and_can_be_mended(nodes: Nodes) -> None:
    nodes[2].cut()
    assert not nodes[2].greets()
    assert not reaches(nodes[0], nodes[2].address, 22)
    assert reaches(nodes[0], nodes[1].address, 22)
    nodes[2].mend()
    assert wait_until(nodes[2].greets, 30)


def test_a_killed_node_takes_everything_along_and_comes_back_empty(nodes: Nodes) -> None:
    node = nodes[1]
    key = node.host_key
    node.exec(["touch", "/var/mine"])
    with node.popen(["sleep", "1000"]) as sleeper:
        assert wait_until(lambda: len(node.processes()) == 1, 10)
        node.kill()
        assert sleeper.wait(10) != 0
    assert not node.greets()
    nodes.restore()
    assert ssh(nodes, node, "ls", "/var/mine").returncode == 2
    assert node.host_key == key


def test_a_full_disk_takes_no_byte(nodes: Nodes) -> None:
    nodes[0].fill_disk()
    assert "No space left" in nodes[0].exec(["sh", "-c", "LC_ALL=C head -c 1 /dev/zero >/var/x"], check=False).stderr
    assert nodes[1].exec(["touch", "/var/x"]).returncode == 0
    nodes[0].free_disk()
    nodes[0].exec(["sh", "-c", "echo x >/var/x"])


def test_nodes_reach_the_services_on_the_bridge_only(nodes: Nodes, cluster_seaweed: Seaweed) -> None:
    assert all(reaches(node, nodes.gateway, cluster_seaweed.ports["s3.port"]) for node in nodes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not any(reaches(node, nodes.gateway, server.getsockname()[1]) for node in nodes)


def test_all_is_gone_when_whoever_made_them_is_killed() -> None:
    command = [sys.executable, "-m", "support.nodes", "up", "1"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [REPOSITORY / "scripts", REPOSITORY / "tests"])),
    }
    maker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    first, second = maker.stdout.readline(), maker.stdout.readline()
    address, folder = second.split()[-1].partition("@")[2], Path(second.split("-i ")[1].split("/key")[0])
    assert first.startswith("control side: ")
    assert answers(address)
    assert folder.is_dir()
    maker.send_signal(signal.SIGKILL)
    maker.wait(10)
    maker.stdout.close()
    assert wait_until(lambda: not answers(address), 30)
    assert wait_until(lambda: not folder.exists(), 30)
    network = address.rpartition(".")[0] + "."
    listed = subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True, check=True).stdout
    assert network not in listed


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Nodes] = []
    create = Nodes._make_network
    monkeypatch.setattr(Nodes, "_make_network", lambda self: (made.append(self), create(self))[1])
    monkeypatch.setattr(node_module, "DISK_MB", "much")
    with pytest.raises(ServiceError, match="node1 did not start.*"), nodes_module.running_nodes(1):
        pass
    assert not made[0].folder.exists()
    assert (
        made[0].bridge not in subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    )


def test_without_the_right_it_fails_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ServiceError, match="sudo make test-cluster"):
        nodes_module.require()
    monkeypatch.setattr(nodes_module, "PATH", "/nowhere")
    with pytest.raises(ServiceError, match="apt-get install .*iproute2 openssh-client openssh-server util-linux"):
        nodes_module.require()
