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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stack.processes import ServiceError, wait_until
from support.places import node_python

PYTHON = "/opt/node/bin/python"
"""The node environment's Python, as a node sees it."""

USER = "trainer"
"""An ordinary user of every node; the key lets in as root as well."""

DISK_MB = 768
_PROGRAMS = {"ip": "iproute2", "sshd": "openssh-server", "ssh-keygen": "openssh-client", "unshare": "util-linux",
             "nsenter": "util-linux", "setpriv": "util-linux", "pivot_root": "util-linux"}  # fmt: skip
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}
_SETUP = Path(__file__).with_name("node_root.sh")
_LOCK = Path("/run/lock/mxdist-nodes")
_START_S = 60.0
_SSHD = """\
HostKey /etc/ssh/host_key
PidFile /run/sshd.pid
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin prohibit-password
PrintMotd no
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class NodeProcess:
    """A process of a node.

    :param pid: as the node sees it.
    :param host_pid: as this machine sees it.
    """

    pid: int
    host_pid: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


class Node:
    """One node. It is up from ``start`` until ``kill``; started again, it is the same machine with an empty disk."""

    def __init__(self, name: str, address: str, *, folder: Path, cluster: Nodes) -> None:
        self.name, self.address, self.folder = name, address, folder
        self.python = PYTHON
        self._cluster = cluster
        self._holder: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._services: set[int] = set()

    @property
    def root(self) -> Path:
        """The node's file system, for reading and writing from here. Absolute links in it lead astray."""
        return Path(f"/proc/{self._init}/root")

    @property
    def link(self) -> str:
        """The bridge's end of the node's cable."""
        return f"{self._cluster.bridge}{self.address.rpartition('.')[2]}"

    @property
    def host_key(self) -> str:
        """The public host key: type and key."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def start(self) -> None:
        """Switch the node on, with its sshd."""
        self.prepare()
        script = ["sh", "-eu", str(_SETUP), str(self.folder / "root"), self.name, f"{DISK_MB}m"]
        python = self._cluster.python
        places = [str(python.parents[1].absolute()), _base_prefix(python), str(self.folder)]
        apart = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL",
                 "--propagation", "private"]  # fmt: skip
        with (self.folder / "init.log").open("wb") as log:
            # Whoever is killed takes his child along: this process the holder, the holder init, init all of the node.
            command = ["setpriv", "--pdeathsig", "KILL", *apart, *script, *places]
            self._holder = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_ENVIRONMENT, start_new_session=True
            )
        if not wait_until(self._ready, _START_S):
            self.kill()
            raise ServiceError(f"{self.name} did not start: {(self.folder / 'init.log').read_text()[-2000:]}")
        self._plug_in()
        self.start_sshd()
        self._cluster.forget(self)
        if not wait_until(self.greets, _START_S):
            raise ServiceError(f"{self.name} is up, but cannot be reached at {self.address}")

    def greets(self) -> bool:
        """Return whether its sshd greets the control side; behind some proxies any address takes connections."""
        try:
            with socket.create_connection((self.address, 22), 2) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def prepare(self) -> None:
        """Write the node's own files: it keeps its host key for good."""
        (self.folder / "root").mkdir(parents=True, exist_ok=True)
        if not (self.folder / "host_key").exists():
            self.new_host_key()
        shutil.copy(self._cluster.key.with_suffix(".pub"), self.folder / "authorized_keys")
        (self.folder / "hosts").write_text(self._cluster.hosts_file())

    def kill(self) -> None:
        """Pull the plug: nobody hears of it, and every process of the node is gone."""
        with suppress(ServiceError):
            self.cut()
        if self._holder is None:
            return
        for pid in (self._init, self._holder.pid):
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._holder.wait(30)
        self._holder, self._init = None, 0
        self._services.clear()
        with suppress(ServiceError):  # the kernel removes it too, when it comes round to it
            _ip("link", "del", self.link)

    def alive(self) -> bool:
        """Return whether the node is up."""
        return self._holder is not None and self._holder.poll() is None

    def cut(self) -> None:
        """Cut the cable to everything: no packet comes or goes, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Mend the cable."""
        _ip("link", "set", self.link, "up")

    def exec(
        self,
        command: Sequence[str],
        *,
        input: str | None = None,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float = 120,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node and return what it wrote, as text.

        :param user: who runs it; default root.
        :raises AssertionError: it failed; not with ``check=False``.
        """
        words = [*self._enter(user), *command]
        done = subprocess.run(
            words, input=input, env=self._environment(environment, user), timeout=timeout_s, text=True,
            stdin=subprocess.DEVNULL if input is None else None, capture_output=True, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {list(command)}: code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def popen(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.STDOUT,
    ) -> subprocess.Popen[bytes]:
        """Start a command on the node. It dies with the process that is returned."""
        tied = ["setpriv", "--pdeathsig", "KILL"]
        return subprocess.Popen(
            [*tied, *self._enter(user), *tied, *command],
            env=self._environment(environment, user), stdin=stdin, stdout=stdout, stderr=stderr,
        )  # fmt: skip

    def serve(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        """Run a command that leaves a daemon; ``processes`` does not count what it leaves."""
        before = {process.pid for process in self.processes(services=True)}
        self.exec(command, environment=environment)
        self._services |= {process.pid for process in self.processes(services=True)} - before

    def processes(self, *, token: str | None = None, services: bool = False) -> list[NodeProcess]:
        """Return the living processes of the node, without its init.

        :param token: only those of one job.
        :param services: also sshd, and what ``serve`` left.
        """
        if not self._init:
            return []
        mine = os.stat(f"/proc/{self._init}/ns/pid").st_ino
        found = [process for process in _in_namespace(mine) if process.pid != 1]
        if not services:
            found = [process for process in found if process.pid not in self._services]
        return [process for process in found if token is None or process.environment.get("MXDIST_TOKEN") == token]

    def fill_disk(self) -> None:
        """Leave no byte of the node's disk free."""
        free = os.statvfs(self.root / "var").f_bavail * os.statvfs(self.root / "var").f_frsize
        if free:
            self.exec(["fallocate", "-l", str(free), "/var/filler"], check=False)
        self.exec(["sh", "-c", "cat /dev/zero >>/var/filler"], check=False)

    def free_disk(self) -> None:
        """Undo ``fill_disk``."""
        (self.root / "var/filler").unlink(missing_ok=True)

    def start_sshd(self, *settings: str) -> None:
        """Start sshd, and wait until it answers.

        :param settings: lines of its configuration that come before the usual ones: the first of a kind counts.
        """
        (self.root / "etc/ssh/sshd_config").write_text("\n".join(settings) + "\n" + _SSHD)
        for name in ("host_key", "host_key.pub"):
            shutil.copy(self.folder / name, self.root / f"etc/ssh/{name}")
        self.serve(["/usr/sbin/sshd", "-E", "/var/log/sshd.log"])
        if not wait_until((self.root / "run/sshd.pid").exists, 30):
            raise ServiceError(f"sshd of {self.name} did not start: {(self.root / 'var/log/sshd.log').read_text()}")

    def stop_sshd(self, *, sessions: bool = True) -> None:
        """End sshd: the port then refuses.

        :param sessions: also what it has let in.
        """
        pid = int((self.root / "run/sshd.pid").read_text())
        doomed = [one for one in self.processes(services=True) if one.pid == pid or (sessions and _is_session(one))]
        for process in doomed:
            with suppress(ProcessLookupError):
                os.kill(process.host_pid, signal.SIGKILL)
        self._services.discard(pid)
        if not wait_until(lambda: not any(Path(f"/proc/{one.host_pid}/cmdline").exists() for one in doomed), 30):
            raise ServiceError(f"sshd of {self.name} does not end")
        (self.root / "run/sshd.pid").unlink(missing_ok=True)

    def restart_sshd(self, *settings: str) -> None:
        """Stop sshd with all its sessions, and start it with other settings."""
        self.stop_sshd()
        self.start_sshd(*settings)

    def new_host_key(self) -> None:
        """Give the node another host key, as somebody would who has taken its place; counts when sshd starts."""
        for name in ("host_key", "host_key.pub"):
            (self.folder / name).unlink(missing_ok=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(self.folder / "host_key"))

    def _enter(self, user: str | None) -> list[str]:
        if not self._init:
            raise ServiceError(f"{self.name} is down")
        words = ["nsenter", f"--target={self._init}", "--mount", "--net", "--pid", "--uts", "--ipc"]
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        return [*words, *as_user]

    def _environment(self, more: Mapping[str, str] | None, user: str | None) -> dict[str, str]:
        home = {"HOME": f"/home/{user}", "USER": user, "LOGNAME": user} if user else {"USER": "root", "LOGNAME": "root"}
        return {**_ENVIRONMENT, **home, **(more or {})}

    def _ready(self) -> bool:
        if self._holder is None or self._holder.poll() is not None:
            raise ServiceError(f"{self.name} did not start: {(self.folder / 'init.log').read_text()[-2000:]}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self._init = int(children[0]) if children else 0
        return bool(self._init) and (self.root / "run/ready").exists()

    def _plug_in(self) -> None:
        with suppress(ServiceError):
            _ip("link", "del", self.link)
        hardware = f"02:6d:78:00:00:{int(self.address.rpartition('.')[2]):02x}"  # others remember it over a restart
        peer = ["peer", "name", "eth0", "address", hardware, "netns", str(self._init)]
        _ip("link", "add", self.link, "type", "veth", *peer)
        _ip("link", "set", self.link, "master", self._cluster.bridge, "up")
        self.exec(["ip", "addr", "add", f"{self.address}/24", "dev", "eth0"])
        self.exec(["ip", "link", "set", "eth0", "up"])
        # As on many hosts: a network that has the same address everywhere, and leads nowhere.
        self.exec(["ip", "link", "add", "docker0", "type", "bridge"])
        self.exec(["ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"])
        self.exec(["ip", "link", "set", "docker0", "up"])


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
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tests", "-f", str(self.key))
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
            if not (node.root / "run/sshd.pid").exists():
                node.start_sshd()

    def forget(self, node: Node) -> None:
        """Make all forget that they could not reach a node."""
        _ip("neigh", "flush", "dev", self.bridge, "to", node.address)
        for other in self.members:
            if other.alive() and other is not node:
                other.exec(["ip", "neigh", "flush", "dev", "eth0", "to", node.address], check=False)

    def down(self) -> None:
        """End everything; also what a failed start has left."""
        for node in self.members:
            node.kill()
        with suppress(ServiceError):
            _ip("link", "del", self.bridge)  # the sweeper does it as well
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
            _ip("link", "add", self.bridge, "type", "bridge", "forward_delay", "0")
            _ip("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")


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
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program, path=_PATH) is None})
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
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=_ENVIRONMENT)
    assert sweeper.stdin is not None
    try:
        yield
    finally:
        sweeper.stdin.close()
        sweeper.wait(60)


def _in_namespace(inode: int) -> Iterator[NodeProcess]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        folder = Path("/proc", entry)
        with suppress(OSError, IndexError):
            if os.stat(folder / "ns/pid").st_ino != inode:
                continue
            status = (folder / "status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if fields["State"][0] in "ZX":
                continue
            words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            pairs = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            yield NodeProcess(int(fields["NSpid"].split()[-1]), int(entry), tuple(words), environment)


def _is_session(process: NodeProcess) -> bool:
    return process.command[0].startswith("sshd: ")


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


def _base_prefix(python: Path) -> str:
    done = subprocess.run([python, "-I", "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True)
    if done.returncode:
        raise ServiceError(f"{python} does not run: {done.stderr}; `make environments` builds it")
    return str(Path(done.stdout.strip()).resolve())


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_ENVIRONMENT)
    if done.returncode:
        raise ServiceError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


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
