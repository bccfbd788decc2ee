"""Nodes for tests: each has its own network, mounts, processes, host name, disk and sshd, all on this machine.

Nothing works by accident on them: a node sees /usr, a copy of /etc and the node environment (read only, at /opt/node),
and neither the checkout nor anybody's home folder, /tmp, files or processes. The control side, which is the machine
itself, reaches them over a bridge. Needs root, and fails without it.

``python -m support.nodes up [COUNT]`` makes some for people, until Ctrl-C.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stack.processes import ServiceError
from support.node import ENVIRONMENT, PATH, PYTHON, USER, Node, ip, run
from support.places import node_python

_PROGRAMS = {"ip": "iproute2", "sshd": "openssh-server", "ssh-keygen": "openssh-client", "unshare": "util-linux",
             "nsenter": "util-linux", "setpriv": "util-linux", "pivot_root": "util-linux"}  # fmt: skip
_LOCK = Path("/run/lock/mxdist-nodes")


class Nodes:
    """Some nodes on one bridge. Names and network are free ones, so that several sets can be up at once.

    :param folder: for keys, logs and mount points; on the machine, out of the nodes' sight.
    :param python: of the environment that the nodes get; default: the node environment.
    """

    def __init__(self, folder: Path, *, python: Path | None = None) -> None:
        self.folder = folder
        self.python = python or node_python()
        self.bridge = f"mx{secrets.token_hex(4)}"  # with a number after it, at most 15 letters
        self.members: list[Node] = []
        self._network: ipaddress.IPv4Network | None = None

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The network of the bridge."""
        if self._network is None:
            raise ServiceError("the nodes are down")
        return self._network

    @property
    def gateway(self) -> str:
        """The control side's own address on the bridge: what the nodes shall reach must listen there."""
        return str(self.network[1])

    @property
    def key(self) -> Path:
        """The private key that every node lets in."""
        return self.folder / "key"

    @property
    def known_hosts(self) -> list[str]:
        """Lines of a known_hosts file: every node by name and address."""
        return [f"{node.name},{node.address} {node.host_key}" for node in self.members]

    def __getitem__(self, number: int) -> Node:
        return self.members[number]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def up(self, count: int) -> None:
        """Make the network and start that many nodes: node1, node2, ..."""
        require()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tests", "-f", str(self.key))
        self._make_network()
        made = [self._make(f"node{number}") for number in range(1, count + 1)]
        for node in made:
            node.start()

    def add(self, name: str) -> Node:
        """Start one more node; those that are there learn its name."""
        node = self._make(name)
        node.start()
        for other in self.members:
            if other.alive():
                (other.root / "etc/hosts").write_text(self.hosts_file())
        return node

    def restore(self) -> None:
        """Start what was killed, mend what was cut, so that the next test finds nodes as they should be."""
        for node in self.members:
            if not node.alive():
                node.kill()
                node.start()
            node.mend()
            node.free_disk()
            node.restore_sshd()

    def forget(self, node: Node) -> None:
        """Make all forget that they could not reach a node."""
        ip("neigh", "flush", "dev", self.bridge, "to", node.address)
        for other in self.members:
            if other.alive() and other is not node:
                other.exec(["ip", "neigh", "flush", "dev", "eth0", "to", node.address], check=False)

    def down(self) -> None:
        """End everything; also what a failed start has left."""
        for node in self.members:
            node.kill()
        with suppress(ServiceError):
            ip("link", "del", self.bridge)  # the sweeper does it as well
        self._network = None

    def hosts_file(self) -> str:
        """Return /etc/hosts of every node."""
        lines = ["127.0.0.1 localhost", f"{self.gateway} control"]
        return "\n".join([*lines, *(f"{node.address} {node.name}" for node in self.members)]) + "\n"

    def _make(self, name: str) -> Node:
        address = str(self.network[10 + len(self.members)])
        node = Node(name, address, folder=self.folder / name, cluster=self)
        self.members.append(node)
        return node

    def _make_network(self) -> None:
        _LOCK.parent.mkdir(parents=True, exist_ok=True)
        with _LOCK.open("w") as lock:  # between the choice and the use, nobody else may choose
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._network = _free_network()
            ip("link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
            ip("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")


@contextmanager
def running_nodes(count: int, *, python: Path | None = None) -> Iterator[Nodes]:
    """Yield that many nodes; they end with the block, after a failed start, and when this process is killed.

    :param python: of the environment that the nodes get; default: the node environment.
    """
    folder = Path(tempfile.mkdtemp(prefix="mxdist-nodes-"))
    folder.chmod(0o700)
    nodes = Nodes(folder, python=python)
    with _swept(nodes):
        try:
            nodes.up(count)
            yield nodes
        finally:
            nodes.down()


def require() -> None:
    """Fail, with what to do about it, unless nodes can be made here.

    :raises ServiceError: a package or the right is missing.
    """
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program, path=PATH) is None})
    if missing:
        raise ServiceError(
            f"tests with nodes need more: apt-get install -y --no-install-recommends {' '.join(missing)}"
        )
    if os.geteuid() != 0:
        raise ServiceError(
            "tests with nodes need root: run them as `sudo make test-cluster`, after `make environments`"
        )
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    if tried.returncode:
        raise ServiceError(f"this machine allows no namespaces (CAP_SYS_ADMIN): {tried.stderr.decode().strip()}")


@contextmanager
def _swept(nodes: Nodes) -> Iterator[None]:
    """Remove bridge and folder at the end, or when this process is gone; the nodes die with it by themselves."""
    # A cable outlives its node for minutes while the kernel tries to deliver the node's last words over it.
    links = 'ip -br link | sed -n "s/^\\($0[0-9]*\\)[@ ].*/\\1/p"'
    script = f'cat >/dev/null; for link in $({links}); do ip link del "$link"; done; rm -rf --one-file-system "$1"'
    command = ["sh", "-c", script, nodes.bridge, str(nodes.folder)]
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=ENVIRONMENT)
    assert sweeper.stdin is not None
    try:
        yield
    finally:
        sweeper.stdin.close()
        sweeper.wait(60)


def _free_network() -> ipaddress.IPv4Network:
    listed = subprocess.run(["ip", "-j", "-4", "route", "show", "table", "all"], capture_output=True, check=True).stdout
    places = [route["dst"] for route in json.loads(listed or b"[]")]
    taken = [ipaddress.IPv4Network(place, strict=False) for place in places if place[0].isdigit()]
    candidates = [
        ipaddress.IPv4Network(f"10.{second}.{third}.0/24") for second in range(200, 250) for third in range(256)
    ]
    random.SystemRandom().shuffle(candidates)
    for network in candidates:
        if not any(network.overlaps(other) for other in taken):
            return network
    raise ServiceError("no network is free between 10.200.0.0 and 10.249.255.255")


def main() -> None:
    """Keep some nodes up until somebody presses Ctrl-C."""
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    if sys.argv[1:2] != ["up"]:
        sys.exit("usage: python -m support.nodes up [COUNT]")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running_nodes(count) as nodes:
        known = nodes.folder / "known_hosts"
        known.write_text("\n".join(nodes.known_hosts) + "\n")
        print(f"control side: {nodes.gateway}; Python of a node: {PYTHON}")
        for node in nodes:
            options = f"-i {nodes.key} -o UserKnownHostsFile={known} -o IdentitiesOnly=yes"
            print(f"{node.name}: ssh -F none {options} {USER}@{node.address}", flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
