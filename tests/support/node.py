"""One node for tests: a network, mounts, processes, a host name, a disk and an sshd of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stack.processes import ServiceError, wait_until

if TYPE_CHECKING:
    from support.nodes import Nodes

PYTHON = "/opt/node/bin/python"
"""The node environment's Python, as a node sees it."""

USER = "trainer"
"""An ordinary user of every node; the key lets in as root as well."""

DISK_MB = 768
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}
_SETUP = Path(__file__).with_name("node_root.sh")
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
        self._sshd_settings: tuple[str, ...] = ()

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
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True
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
            ip("link", "del", self.link)

    def alive(self) -> bool:
        """Return whether the node is up."""
        return self._holder is not None and self._holder.poll() is None

    def cut(self) -> None:
        """Cut the cable to everything: no packet comes or goes, and nobody is told."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Mend the cable."""
        ip("link", "set", self.link, "up")

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
        self._sshd_settings = settings
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

    def restore_sshd(self) -> None:
        """Let sshd run with the usual settings, if it does not."""
        if not (self.root / "run/sshd.pid").exists():
            self.start_sshd()
        elif self._sshd_settings:
            self.restart_sshd()

    def new_host_key(self) -> None:
        """Give the node another host key, as somebody would who has taken its place; counts when sshd starts."""
        for name in ("host_key", "host_key.pub"):
            (self.folder / name).unlink(missing_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(self.folder / "host_key"))

    def _enter(self, user: str | None) -> list[str]:
        if not self._init:
            raise ServiceError(f"{self.name} is down")
        words = ["nsenter", f"--target={self._init}", "--mount", "--net", "--pid", "--uts", "--ipc"]
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        return [*words, *as_user]

    def _environment(self, more: Mapping[str, str] | None, user: str | None) -> dict[str, str]:
        home = {"HOME": f"/home/{user}", "USER": user, "LOGNAME": user} if user else {"USER": "root", "LOGNAME": "root"}
        return {**ENVIRONMENT, **home, **(more or {})}

    def _ready(self) -> bool:
        if self._holder is None or self._holder.poll() is not None:
            raise ServiceError(f"{self.name} did not start: {(self.folder / 'init.log').read_text()[-2000:]}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self._init = int(children[0]) if children else 0
        return bool(self._init) and (self.root / "run/ready").exists()

    def _plug_in(self) -> None:
        with suppress(ServiceError):
            ip("link", "del", self.link)
        hardware = f"02:6d:78:00:00:{int(self.address.rpartition('.')[2]):02x}"  # others remember it over a restart
        peer = ["peer", "name", "eth0", "address", hardware, "netns", str(self._init)]
        ip("link", "add", self.link, "type", "veth", *peer)
        ip("link", "set", self.link, "master", self._cluster.bridge, "up")
        self.exec(["ip", "addr", "add", f"{self.address}/24", "dev", "eth0"])
        self.exec(["ip", "link", "set", "eth0", "up"])
        # As on many hosts: a network that has the same address everywhere, and leads nowhere.
        self.exec(["ip", "link", "add", "docker0", "type", "bridge"])
        self.exec(["ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"])
        self.exec(["ip", "link", "set", "docker0", "up"])


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


def _base_prefix(python: Path) -> str:
    done = subprocess.run([python, "-I", "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True)
    if done.returncode:
        raise ServiceError(f"{python} does not run: {done.stderr}; `make environments` builds it")
    return str(Path(done.stdout.strip()).resolve())


def run(*command: str) -> None:
    """Run a command of this machine.

    :raises ServiceError: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    if done.returncode:
        raise ServiceError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def ip(*arguments: str) -> None:
    """Change this machine's network, by ``ip``."""
    run("ip", *arguments)
