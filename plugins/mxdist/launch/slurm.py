"""Jobs on Slurm: a batch script for each supervisor; the batch step is the supervisor, ``srun`` starts its agents.

Slurm's names of jobs are not unique, so the run store decides: the supervisor's first act is to claim its place, and
one that finds it taken exits 0. Nothing here needs accounting: who is in the queue, ``squeue`` knows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxdist.environment import SECRET_NAMES, base_environment, travelling
from mxdist.errors import LaunchError, Problem, SpecError
from mxdist.launch.base import Launcher, Life, Sent
from mxdist.launch.bundle import Bundle
from mxdist.launch.delivery import publish
from mxdist.launch.hosts import HostPlan, place
from mxdist.launch.local import HEARTBEAT_LOST_S
from mxdist.launch.plan import Plan, build_plan, user_file
from mxdist.launch.slurm_commands import Commands, commands_at
from mxdist.launch.slurm_script import MARK, OUTPUT, batch_script, job_name, payload
from mxdist.launch.summon import bootstrap
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.cluster import Code
from mxdist.store import Attempt
from mxdist.store.sequence import WIDTH

if TYPE_CHECKING:
    from mxdist.ssh import SshAccess

DEFAULT_WORKDIR = "~/.local/state/mxdist/jobs"
"""Where a node keeps what jobs leave there, unless job, connection or its own $MXDIST_WORKDIR say otherwise."""

OVER = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
     "TIMEOUT"]
)  # fmt: skip
"""States of jobs that do not come back. A job that does is PENDING, or about to be."""

_ROW = re.compile(r"^mxdist\|(\d+)\|([A-Z_]+)[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|(.*)$")
_FORMAT = "mxdist|%i|%T|%r|%B|%M|%j"
_RAN = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
_QUEUED_S = 6.0  # what waits longer waits for its turn
_START_S = 120.0
_GONE_S = 150.0  # KillWait, and an epilog
_SILENT_S = 900.0
_REFUSED = {
    "partition": ("invalid partition", "partition"),
    "account": ("invalid account", "account"),
    "qos": ("invalid qos", "qos"),
    "constraint": ("invalid feature", "constraint"),
    "reservation": ("reservation", "reservation"),
    "gres": ("generic resource", "gres, gpus_per_node"),
    "time_limit_s": ("time limit", "time_limit_s"),
    "memory": ("memory", "memory"),
}


@dataclass(frozen=True)
class Queued:
    """A job as Slurm sees it.

    :param state: without what some versions put after it (``CANCELLED by 1000``).
    :param host: its first node, once it has one.
    :param ran_s: how long it has been running since it was started last.
    """

    number: str
    state: str
    reason: str
    host: str
    ran_s: int
    name: str

    @property
    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in OVER


class SlurmLauncher(Launcher):
    """Jobs on a Slurm cluster.

    :param head: a head node and how it is entered over ssh; None: Slurm's commands are on this host.
    :param python: Python of the node environment on the nodes, unless the job names one; default:
        ``$MXDIST_NODE_PYTHON``.
    :param workdir: the folder of all scratch folders there, unless the job names one.
    """

    def __init__(
        self,
        head: tuple[HostPlan, SshAccess] | None = None,
        *,
        python: str | None = None,
        workdir: str | Path | None = None,
        commands: Commands | None = None,
    ) -> None:
        self._commands = commands or commands_at(head)
        self._python = python
        self._workdir = workdir

    def plan(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> Plan:
        self._check_shared(job)
        workdir = self._workdir_of(job) or DEFAULT_WORKDIR
        return build_plan(job, job_key, runs_uri=runs_uri, python=self._python_of(job), workdir=workdir, cores=())

    def sends(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> tuple[Sent, ...]:
        name = job_name(job_key, "<attempt>", "<incarnation>", None)
        constant = "<constant text, and a document that names the attempt and its code>"
        text = batch_script(
            job, place(job), name=name, names=SECRET_NAMES, python=self._python_of(job), frames=constant
        )
        return (Sent(f"sbatch script, on {self._commands.where}", text),)

    def start(self, attempt: Attempt, bundle: Bundle, *, incarnation: int, secrets: Mapping[str, str]) -> bool:
        """Submit the job, and return when it runs, or waits for its turn. See ``Launcher.start``."""
        with self._commands.kept():
            return self._start(attempt, bundle, incarnation, secrets)

    def _start(self, attempt: Attempt, bundle: Bundle, incarnation: int, secrets: Mapping[str, str]) -> bool:
        name = _name(attempt, incarnation)
        known = [one for one in self._queue([name]) if not one.over]
        if known or attempt.supervisors.last() >= incarnation:
            return False
        self._end(self._living(attempt), attempt, grace_s=0)
        kept = {secret: value for secret, value in secrets.items() if secret in SECRET_NAMES and value}
        script = self._script(attempt, bundle, name, incarnation, kept)
        return self._await(attempt, incarnation, self._submit(script, name, kept))

    def life(self, attempt: Attempt) -> Life:
        """See ``Launcher.life``. Who waits in the queue is alive: Slurm has him."""
        number = attempt.supervisors.last()
        try:
            living = self._living(attempt)
        except LaunchError:
            if number and time.time() - _heard(attempt, number) < HEARTBEAT_LOST_S:
                return Life.ALIVE
            raise
        waiting = all(one.state == "PENDING" for one in living)
        if not living or (waiting and attempt.cancel_intent() is not None):  # who waits cannot act on a cancel
            return Life.DEAD if number else Life.NEVER
        long = all(one.state == "RUNNING" and one.ran_s > _SILENT_S for one in living)  # else nobody could be heard yet
        mute = number and long and attempt.result() is None
        if mute and time.time() - _heard(attempt, number) > _SILENT_S:
            return Life.DEAD
        return Life.ALIVE

    def kill(self, attempt: Attempt, *, grace_s: float) -> None:
        with self._commands.kept():
            self._end(self._living(attempt), attempt, grace_s=grace_s)

    def _living(self, attempt: Attempt) -> list[Queued]:
        numbers = range(1, attempt.supervisors.last() + 2)
        return [one for one in self._queue(_name(attempt, number) for number in numbers) if not one.over]

    def _queue(self, names: Iterable[str]) -> list[Queued]:
        """Return the user's jobs with these names, also those that have ended a short time ago."""
        command = ["squeue", "--me", "--noheader", "--states=all", f"--name={','.join(names)}", f"--format={_FORMAT}"]
        ran = self._commands.run(command)
        if ran.returncode:
            raise LaunchError(
                f"squeue failed on {self._commands.where}: {_line(ran.err)}", hint="`scontrol ping` tells more."
            )
        rows = [_ROW.match(line) for line in ran.out.splitlines()]
        return [Queued(row[1], row[2], row[3], row[4], _seconds(row[5]), row[6]) for row in rows if row]

    def _script(self, attempt: Attempt, bundle: Bundle, name: str, incarnation: int, secrets: Mapping[str, str]) -> str:
        job = attempt.claim.parsed()
        document = {
            "what": "supervisor",
            "foreground": True,
            "code": self._deliver(attempt, job, bundle),
            "python": self._python_of(job),
            "workdir": self._workdir_of(job),
            "runs_uri": attempt.job.runs.uri,
            "job_key": attempt.claim.job_key,
            "attempt": attempt.number,
            "token": attempt.claim.token,
            "storage": job.storage.to_document(),
            "link_timeout_s": job.limits.link_timeout_s,
            "incarnation": incarnation,
            "environment": travelling(base_environment(os.environ)),
            "secret_names": sorted(secrets),
        }
        frames = payload(_batch(), document, bootstrap())
        return batch_script(job, place(job), name=name, names=secrets, python=self._python_of(job), frames=frames)

    def _submit(self, script: str, name: str, secrets: Mapping[str, str]) -> str:
        """Return the number of the Slurm job."""
        ran = self._commands.run(["sbatch", "--parsable"], text=script, environment={**secrets, MARK: name})
        found = re.findall(r"^(\d+)(?:;\S+)?$", ran.out, re.M)
        if ran.returncode or not found:
            raise _refused(_line(ran.err or ran.out), self._commands.where)
        return str(found[-1])

    def _await(self, attempt: Attempt, incarnation: int, number: str) -> bool:
        """Wait until the supervisor has claimed its place, or the job has to wait for its turn."""
        name = _name(attempt, incarnation)
        begun = time.monotonic()
        while True:
            claimed = _claimed_by(attempt, incarnation)
            if claimed is not None:
                return claimed.startswith(f"secrets-slurm-{number}-")
            found = next((one for one in self._queue([name]) if one.number == number), None)
            waited_s = time.monotonic() - begun
            if found is None or found.over:
                claimed = _claimed_by(attempt, incarnation)
                if claimed is None:
                    raise _failed_early(attempt, number, found)
                continue
            if waited_s > _START_S or (found.state == "PENDING" and waited_s > _QUEUED_S):
                return True
            time.sleep(min(2.0, 0.2 + waited_s / 10))

    def _end(self, jobs: list[Queued], attempt: Attempt, *, grace_s: float) -> None:
        """Cancel jobs, and wait until the queue does not know them any more."""
        if not jobs:
            return
        numbers = [one.number for one in jobs]
        if grace_s <= 0:  # fails for those that do not run, which need no signal
            self._commands.run(["scancel", "--signal=KILL", "--full", *numbers])
        self._commands.run(["scancel", *numbers])
        give_up = time.monotonic() + grace_s + _GONE_S
        while left := self._living(attempt):
            if time.monotonic() > give_up:
                told = ", ".join(f"{one.number} ({one.state} on {one.host})" for one in left)
                raise LaunchError(
                    f"Slurm has not ended the job {told}, although it was cancelled.",
                    hint="A node may be out of Slurm's reach: `scontrol show node` tells.",
                )
            time.sleep(0.5)

    def _deliver(self, attempt: Attempt, job: TrainingJob | EvaluationJob, bundle: Bundle) -> dict[str, Any]:
        """Bring the code to where the nodes find it; return what they are told of it."""
        if job.cluster.code is Code.SHARED:
            folder = Path(str(self._workdir_of(job))) / attempt.claim.job_key / f"{attempt.number:0{WIDTH}d}" / "code"
            try:
                folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                bundle.write(folder)
            except OSError as error:
                hint = "cluster.code: shared needs a workdir on a disk that this host sees as well."
                raise LaunchError(f"cannot write the code to {folder}: {error}", hint=hint) from error
            return {"how": "shared", "folder": str(folder)}
        if job.cluster.code is Code.IMAGE and user_file(job)[1] is None:
            return {"how": "image"}
        return {**publish(bundle, attempt.job.runs), "how": job.cluster.code.value}

    def _check_shared(self, job: TrainingJob | EvaluationJob) -> None:
        if job.cluster.code is Code.SHARED and self._workdir_of(job) is None:
            problem = Problem("cluster.workdir", "is required with code: shared: a folder on the shared disk")
            raise SpecError("The job", [problem])

    def _python_of(self, job: TrainingJob | EvaluationJob) -> str:
        python = job.cluster.python or self._python or os.environ.get("MXDIST_NODE_PYTHON")
        if not python:
            raise LaunchError(
                "no Python of a node environment (with mxnet and horovod) is known.",
                hint="Set cluster.python in the job, node_python in the connection, or MXDIST_NODE_PYTHON.",
                retryable=False,
            )
        return python

    def _workdir_of(self, job: TrainingJob | EvaluationJob) -> str | None:
        found = job.cluster.workdir or self._workdir
        return None if found is None else str(found)


def _batch() -> str:
    """Return the text of ``mxdist.runtime.slurm_batch``."""
    import mxdist

    return (Path(mxdist.__file__).parent / "runtime" / "slurm_batch.py").read_text(encoding="utf-8")


def _seconds(ran: str) -> int:
    """Return a time as squeue writes it, ``days-hours:minutes:seconds``; 0 for what is none, such as ``INVALID``."""
    found = _RAN.fullmatch(ran.strip())
    if not found:
        return 0
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _name(attempt: Attempt, incarnation: int) -> str:
    return job_name(attempt.claim.job_key, attempt.number, incarnation, attempt.claim.token)


def _claimed_by(attempt: Attempt, incarnation: int) -> str | None:
    """Return the nonce of whoever has claimed the place, or a later one; None: nobody."""
    for _, document in attempt.supervisors.read(after=incarnation - 1):
        return str(document.get("nonce"))
    return None


def _heard(attempt: Attempt, number: int) -> float:
    """Return when the newest supervisor was last heard of."""
    claims = [float(document["at"]) for _, document in attempt.supervisors.read(after=number - 1)]
    return max([attempt.read_state().heartbeat, *claims])


def _failed_early(attempt: Attempt, number: str, found: Queued | None) -> LaunchError:
    job = attempt.claim.parsed()
    output = (job.cluster.slurm.output or OUTPUT).replace("%j", number).replace("%x", found.name if found else "<name>")
    return LaunchError(
        f"Slurm job {number} has ended ({found.state if found else 'Slurm does not know it any more'}) before its "
        f"supervisor had started.",
        hint=f"Its output is {output} on {found.host if found and found.host else 'its first node'}. Check that "
        f"cluster.python is there, and that the nodes reach the run store.",
    )


def _refused(said: str, where: str) -> LaunchError:
    low = said.lower()
    fields = next((fields for words, fields in _REFUSED.values() if words in low), "")
    hint = f"Check cluster.slurm.{fields} of the job." if fields else "Check cluster.slurm, nodes and slots of the job."
    busy = any(words in low for words in ("unable to contact", "socket timed out", "temporarily", "connect failure"))
    if busy:
        hint = "Does the controller live? `scontrol ping` says so."
    full = "submitjob" in low  # AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit, and their like
    if full:
        hint = "The user has as many jobs in the queue as allowed: wait until some have ended."
    return LaunchError(f"sbatch on {where} refused the job: {said}", hint=hint, retryable=busy or full)


def _line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines))[:500] or "it said nothing"
