"""A preflight's way to the nodes of Slurm: one ``srun`` of its own, for a moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from mxdist.launch.hosts import HostPlan
from mxdist.launch.slurm_script import directives
from mxdist.launch.summon import command
from mxdist.spec import TrainingJob
from mxdist.spec.job import BaseJob

if TYPE_CHECKING:
    from mxdist.runtime.channel import Channel
    from mxdist.ssh import SshAccess

NAME = "mxdist-preflight"
_IMMEDIATE_S = 8
_NODES = ("nodes", "ntasks-per-node", "partition", "account", "qos", "reservation", "constraint", "gres",
          "gpus-per-node", "mem", "cpus-per-task", "exclusive")  # fmt: skip
"""What a look at the nodes asks for as the job does."""

_KEPT = ("HOME", "LANG", "LOGNAME", "PATH", "SLURM_CONF", "SLURM_JWT", "TZ", "USER")


def srun_command(job: BaseJob, hosts: Sequence[HostPlan], python: str) -> list[str]:
    """Return the command that starts a probe on each node, or gives up at once when the nodes are busy.

    The nodes get nothing of the environment: what a probe must know, secrets too, it reads from its input.
    """
    asked = directives(cast("TrainingJob", job), hosts, name=NAME, names=())  # which reads what all jobs have
    wanted = [word for word in asked if word.removeprefix("--").partition("=")[0] in _NODES]
    own = [f"--job-name={NAME}", "--time=5", f"--immediate={_IMMEDIATE_S}", "--mpi=none", "--cpu-bind=none",
           "--kill-on-bad-exit=0", "--export=NONE", "--chdir=/", "--quiet"]  # fmt: skip
    return ["srun", *wanted, *own, *command(python)]


@contextmanager
def srun(
    job: BaseJob, hosts: Sequence[HostPlan], python: str, head: tuple[HostPlan, SshAccess] | None
) -> Iterator[Channel]:
    """Yield the channel to the probes on the nodes.

    :param head: the head node and how it is entered; None: Slurm's commands are on this host.
    :raises LaunchError: the head node cannot be entered, or there is no ``srun`` here.
    """
    from mxdist.runtime.channel import PipeChannel

    words = srun_command(job, hosts, python)
    if head is None:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        channel: Channel = PipeChannel(["env", *words], environment)  # env says in its own words what cannot be run
        try:
            yield channel
        finally:
            channel.close()
        return
    from mxdist.runtime.ssh_channel import SshOpener

    opener = SshOpener(head[1])
    try:
        channel = opener.open(head[0], ["sh", "-lc", 'exec "$@"', "sh", *words])
        try:
            yield channel
        finally:
            channel.close()
    finally:
        threading.Thread(target=opener.close, daemon=True).start()
