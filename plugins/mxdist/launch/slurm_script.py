"""What is handed to Slurm: a batch script, and the command that starts an agent on a node of the allocation. Pure.

The script holds no secret: the names of their variables alone (``--export``), whose values sbatch takes from its own
environment. No value of a job reaches a shell but ``setup``, which is shell by its nature: the directives are read by
sbatch, and everything else travels in frames that Python reads from its standard input.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mxdist.launch.hosts import HostPlan
from mxdist.launch.summon import command
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.platforms import Slurm

AGENT = (
    "srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist={host}", "--immediate=30", "--mpi=none",
    "--cpu-bind=none", "--kill-on-bad-exit=0", "--export=ALL", "--unbuffered", "--input=0", "--quiet",
)  # fmt: skip
"""How an agent is started on a node: beside the batch step (``--overlap``), with all that the job has on that node. It
does not queue for ever: who is not started within 30 seconds is given up."""

MARK = "MXDIST_SLURM"
"""A variable of the job that says its name; so there is always one to export, and nothing else is."""

OUTPUT = "/tmp/%x-%j.out"  # noqa: S108  # the one folder that every node has; named after the job
_END = "MXDIST_END"
_LEAD_S = 60  # Slurm's clock for signals before the time limit is that coarse


def job_name(job_key: str, attempt: int | str, incarnation: int | str, token: str | None) -> str:
    """Return the name of the Slurm job for one supervisor of an attempt.

    :param token: the attempt's, for another run store may have the same key; None: there is no attempt yet.
    """
    digest = hashlib.sha256(token.encode()).hexdigest()[:8] if token is not None else "xxxxxxxx"
    return f"mxdist-{job_key}-{attempt}-{incarnation}-{digest}"


def directives(
    job: TrainingJob | EvaluationJob, hosts: Sequence[HostPlan], *, name: str, names: Iterable[str]
) -> list[str]:
    """Return what sbatch is asked for, as its own options.

    One task a node: the agent, which has all cores of the job there, and starts the ranks of the node.

    :param names: variables that the job gets from sbatch's environment; none else travel.
    """
    asked, limits = job.cluster.slurm, job.limits
    return [
        f"--job-name={name}",
        "--dependency=singleton",  # of two jobs with this name, the second starts when there is nothing left to do
        f"--nodes={len(hosts)}",
        "--ntasks-per-node=1",
        *_resources(asked, max(host.slots for host in hosts)),
        f"--signal=B:TERM@{math.ceil(limits.grace_s) + _LEAD_S}",
        "--requeue" if asked.requeue else "--no-requeue",
        "--chdir=/",
        f"--output={asked.output or OUTPUT}",
        "--open-mode=append",
        f"--export={','.join([MARK, *sorted(set(names))])}",
    ]


def batch_script(
    job: TrainingJob | EvaluationJob,
    hosts: Sequence[HostPlan],
    *,
    name: str,
    names: Iterable[str],
    python: str,
    frames: str,
) -> str:
    """Return the whole script.

    :param python: of the node environment.
    :param frames: what Python reads from its standard input: ``payload``.
    """
    head = ["#!/bin/bash -l", *(f"#SBATCH {word}" for word in directives(job, hosts, name=name, names=names))]
    body = [
        'export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}" HOME="${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}"',
        *job.cluster.slurm.setup,
        f"exec {shlex.join(command(python))} <<'{_END}'",
    ]
    return "\n".join([*head, *body, frames.removesuffix("\n"), _END, ""])


def payload(first: str, document: Mapping[str, Any], bootstrap: str) -> str:
    """Return the frames of a script.

    :param first: the text of ``mxdist.runtime.slurm_batch``, which reads the others.
    :param document: for ``mxdist.runtime.bootstrap``, without what only the allocation knows.
    """
    parts = [first, json.dumps(document), bootstrap]
    return "".join(f"{len(part.encode())}\n{part}" for part in parts)


def _resources(asked: Slurm, slots: int) -> list[str]:
    words = {
        "partition": asked.partition, "account": asked.account, "qos": asked.qos, "reservation": asked.reservation,
        "constraint": asked.constraint, "gres": asked.gres, "gpus-per-node": asked.gpus_per_node, "mem": asked.memory,
        "time": None if asked.time_limit_s is None else time_limit(asked.time_limit_s),
        "cpus-per-task": slots * (asked.cpus_per_slot or 1) if asked.cpus_per_slot or not asked.exclusive else None,
    }  # fmt: skip
    given = [f"--{option}={value}" for option, value in words.items() if value is not None]
    return [*given, *(["--exclusive"] if asked.exclusive else [])]


def time_limit(seconds: int) -> str:
    """Return a time as Slurm reads it: ``days-hours:minutes:seconds``."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
