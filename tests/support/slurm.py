"""A real Slurm over nodes: munge, a controller on a head node, one slurmd a node; no systemd, no accounting.

The control side is a submit host too: ``environment`` makes its ``sbatch`` and ``squeue`` find this cluster.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stack.processes import ServiceError, wait_until
from support.node import Node
from support.nodes import Nodes

_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
_SOCKET = "/run/munge/munge.socket"
_FOLDERS = (
    "/etc/munge",
    "/etc/slurm",
    "/run/munge",
    "/run/slurm",
    "/var/lib/munge",
    "/var/log/munge",
    "/var/spool/slurm",
)
_READY_S = 90.0
_CONF = """\
ClusterName=mxdist
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation=/var/spool/slurm/state
SlurmdSpoolDir=/var/spool/slurm/d
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
UnkillableStepTimeout=300
KillWait={kill_wait_s}
MinJobAge=20
SlurmdParameters=config_overrides
DebugFlags=NO_CONF_HASH
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
{nodes}
PartitionName=work Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=15
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""

WORKDIR = "/var/mxdist"
"""Where jobs of the tests keep their files on a node."""


class Slurm:
    """A Slurm whose controller runs on a node of its own, ``head``."""

    def __init__(self, nodes: Nodes, head: Node, folder: Path) -> None:
        self.nodes, self.head, self.folder = nodes, head, folder
        self._key = secrets.token_bytes(1024)
        self._munged: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands on the control side need to find this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def up(self) -> None:
        """Start everything, and wait until all nodes are idle."""
        require()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._submit_host()
        for node in [self.head, *self.workers]:
            self.equip(node)
        self.head.serve(["slurmctld"])
        for node in self.workers:
            node.serve(["slurmd", "-N", node.name])
        self.wait_idle()

    @property
    def workers(self) -> list[Node]:
        """The nodes that run jobs."""
        return [node for node in self.nodes if node is not self.head]

    def equip(self, node: Node) -> None:
        """Give a node the files of the cluster, and its munge."""
        for folder in _FOLDERS:
            (node.root / folder[1:]).mkdir(parents=True, exist_ok=True)
        (node.root / "etc/munge/munge.key").write_bytes(self._key)
        (node.root / "etc/slurm/slurm.conf").write_text(self._conf(_SOCKET))
        node.exec(["chown", "-R", "root:", "/etc/munge", "/run/munge", "/var/lib/munge", "/var/log/munge"])
        node.exec(["chmod", "700", "/etc/munge", "/var/lib/munge"])
        node.exec(["chmod", "400", "/etc/munge/munge.key"])
        node.exec(["chmod", "755", "/run/munge", "/run"])
        node.serve(["munged", f"--socket={_SOCKET}"])

    def restore(self) -> None:
        """Bring back what a test took down, and end the jobs that it left."""
        with suppress(ServiceError, subprocess.SubprocessError):
            self.run("scancel", "--user=root", "--full", "--signal=KILL")
        self.run("scancel", "--user=root")
        for node in self.workers:
            if not any("slurmd" in process.command[0] for process in node.processes(services=True)):
                self.equip(node)
                node.serve(["slurmd", "-N", node.name])
        with suppress(ServiceError):  # fails for nodes that need it not
            names = ",".join(node.name for node in self.workers)
            self.run("scontrol", "update", f"nodename={names}", "state=resume")
        self.wait_idle()

    def wait_idle(self) -> None:
        """Wait until every node waits for work."""
        if not wait_until(self._idle, _READY_S, poll_s=0.2):
            log = (self.head.root / "var/log/slurmctld.log").read_text()[-3000:]
            raise ServiceError(f"Slurm's nodes are not idle: {self.run('sinfo', '-N')}\n{log}")

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """Run one of Slurm's commands on the control side; return what it says."""
        environment = {"PATH": os.environ["PATH"], **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise ServiceError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """Return the states of all jobs that Slurm still knows, by their names."""
        lines = self.run("squeue", "--noheader", "--states=all", "--format=%j %T").splitlines()
        return dict(line.split() for line in lines)

    def states(self) -> dict[str, str]:
        """Return the states of all jobs that Slurm still knows, by their numbers."""
        lines = self.run("squeue", "--noheader", "--states=all", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def down(self) -> None:
        """End what runs on the control side; the rest ends with the nodes."""
        if self._munged is not None:
            self._munged.terminate()
            self._munged.wait(30)

    def _idle(self) -> bool:
        with suppress(ServiceError):
            return self.run("sinfo", "--noheader", "--partition=work", "--format=%T %D").split() == [
                "idle",
                str(len(self.workers)),
            ]
        return False

    def _submit_host(self) -> None:
        key, socket = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(self._key)
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(self._conf(str(socket)))
        command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}"]
        command += [f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"]
        command += [f"--seed-file={self.folder}/munged.seed"]
        with (self.folder / "munged.out").open("wb") as log:
            tied = ["setpriv", "--pdeathsig", "KILL", *command]
            self._munged = subprocess.Popen(tied, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if not wait_until(socket.exists, 30):
            raise ServiceError(f"munged did not start: {(self.folder / 'munged.out').read_text()}")

    def _conf(self, socket: str) -> str:
        lines = [f"NodeName={node.name} NodeAddr={node.address} CPUs=2 RealMemory=8000" for node in self.workers]
        return _CONF.format(
            head=self.head.address, socket=socket, port=26817, node_port=26818, kill_wait_s=30, nodes="\n".join(lines)
        )


@contextmanager
def running_slurm(nodes: Nodes, folder: Path) -> Iterator[Slurm]:
    """Yield a Slurm over all nodes there are, with a head node that is made for it."""
    head = next((node for node in nodes if node.name == "head"), None) or nodes.add("head")
    slurm = Slurm(nodes, head, folder)
    try:
        slurm.up()
        yield slurm
    finally:
        slurm.down()


def require() -> None:
    """Fail, with what to do about it, unless Slurm is installed.

    :raises ServiceError: a package is missing.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program, path=path) is None})
    if missing:
        raise ServiceError(
            f"tests with Slurm need more: apt-get install -y --no-install-recommends {' '.join(missing)}"
        )
