"""Jobs on hosts that are reached over ssh: the first host of the plan runs the supervisor, which reaches the others.

What a host has to do is sent to it (``mxdist.launch.summon``) through the connection: a constant command reads it from
its standard input. So nothing has to be installed there but the node environment, and no command line says anything.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxdist.environment import SECRET_NAMES, base_environment, travelling
from mxdist.errors import LaunchError, Problem, SpecError, StoreError
from mxdist.launch.base import Launcher, Life, Sent
from mxdist.launch.bundle import Bundle
from mxdist.launch.delivery import publish
from mxdist.launch.hosts import HostPlan, place
from mxdist.launch.local import HEARTBEAT_LOST_S
from mxdist.launch.plan import Plan, build_plan, user_file
from mxdist.launch.summon import command, frames
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.cluster import Code
from mxdist.ssh import SshAccess
from mxdist.store import Attempt
from mxdist.store.sequence import WIDTH

if TYPE_CHECKING:
    from mxdist.ssh import Done

DEFAULT_WORKDIR = "~/.local/state/mxdist/jobs"
"""Where a host keeps what jobs leave there, unless job, connection or its own $MXDIST_WORKDIR say otherwise."""

_START_S = 180.0  # a host gets the code, and its supervisor reaches the run store
_LIFE_S = 30.0
_END_S = 60.0  # beyond the grace
_GIVEN_UP_S = 3600.0  # without a sign of life
_GUARD_S = 40.0  # beyond the link's timeout: for a guard to end what it guards


class SshLauncher(Launcher):
    """Jobs on the hosts that they name.

    :param access: how the hosts are entered, unless the job says otherwise; default: the user's own files and agent.
    :param python: Python of the node environment there, unless the job names one; default: ``$MXDIST_NODE_PYTHON``.
    :param workdir: the folder of all scratch folders there, unless the job names one.
    """

    def __init__(
        self, access: SshAccess | None = None, *, python: str | None = None, workdir: str | Path | None = None
    ) -> None:
        self._access = access or SshAccess()
        self._python = python
        self._workdir = workdir

    def plan(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> Plan:
        self._check_shared(job)
        return build_plan(
            job,
            job_key,
            runs_uri=runs_uri,
            python=self._python_of(job),
            workdir=self._workdir_of(job) or DEFAULT_WORKDIR,
            cores=(),
        )

    def sends(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> tuple[Sent, ...]:
        access, hosts = self._access.for_job(job.cluster.ssh), place(job)
        words = " ".join(command(self._python_of(job))[:3]) + " <constant text that reads the rest from its input>"
        return tuple(
            Sent(f"command on {_login(access, host)}: {what}", words)
            for host, what in zip(
                hosts, ["the supervisor", *["an agent, by the supervisor"] * len(hosts)], strict=False
            )
        )

    def start(self, attempt: Attempt, bundle: Bundle, *, incarnation: int, secrets: Mapping[str, str]) -> bool:
        from mxdist.ssh import Ssh

        job, nonce = attempt.claim.parsed(), uuid.uuid4().hex
        hosts, access = place(job), self._access.for_job(job.cluster.ssh)
        kept = {name: value for name, value in secrets.items() if name in SECRET_NAMES and value}
        failed: LaunchError | None = None
        with Ssh(access) as ssh:
            ssh.connect(hosts[:1])
            document = {
                **self._document(attempt, job, "supervisor", self._deliver(attempt, job, bundle)),
                "environment": travelling(base_environment(os.environ)),
                "secrets": kept | access.secrets(hosts),
                "incarnation": incarnation,
                "nonce": nonce,
                "here": hosts[0].name,
                "opener": access.opener(),
            }
            try:
                done = ssh.run(hosts[0], command(self._python_of(job)), stdin=frames(document), timeout_s=_START_S)
                _answer(hosts[0], done)
            except LaunchError as error:  # the run store knows better
                failed = error
        ours = _claimed_by_us(attempt, incarnation, nonce)
        if ours is None:
            raise failed or LaunchError(
                f"the supervisor of {attempt.claim.job_key} did not start on {hosts[0].name}: {done.last_words}",
                hint=f"Check the node environment there ({self._python_of(job)}).",
            )
        return ours

    def life(self, attempt: Attempt) -> Life:
        number = attempt.supervisors.last()
        document = _document_of(attempt, number)
        if document is None:
            return Life.NEVER
        if time.time() - max(attempt.read_state().heartbeat, document["at"]) < HEARTBEAT_LOST_S:
            return Life.ALIVE if attempt.result() is None else self._ask_life(attempt, document)
        return self._ask_life(attempt, document)

    def kill(self, attempt: Attempt, *, grace_s: float) -> None:
        from mxdist.ssh import Ssh

        job, started = attempt.claim.parsed(), _ever_started(attempt)
        hosts = place(job) if started else place(job)[:1]
        document = self._document(attempt, job, "end", _code_again(attempt, job, self._workdir_of(job)))
        with Ssh(self._access.for_job(job.cluster.ssh)) as ssh:
            found = ssh.run_all(
                hosts,
                command(self._python_of(job)),
                stdin=frames({**document, "grace_s": grace_s}),
                timeout_s=grace_s + _END_S,
            )
        failed = {host.name: error for host in hosts if (error := _error_of(host, found[host.name])) is not None}
        if failed and started and not _left_to_guards(attempt, job.limits.link_timeout_s):
            raise _not_ended(attempt, failed, job.limits.link_timeout_s)

    def _ask_life(self, attempt: Attempt, document: Mapping[str, Any]) -> Life:
        """Ask the first host; one that cannot be reached has a supervisor that nobody hears: it counts as dead."""
        from mxdist.ssh import Ssh

        job = attempt.claim.parsed()
        host = place(job)[0]
        asked = {
            **self._document(attempt, job, "life", _code_again(attempt, job, self._workdir_of(job))),
            "pid": document["pid"],
            "start_time": document["start_time"],
        }
        try:
            with Ssh(self._access.for_job(job.cluster.ssh)) as ssh:
                done = ssh.run(host, command(self._python_of(job)), stdin=frames(asked), timeout_s=_LIFE_S)
            return Life.ALIVE if _answer(host, done).get("alive") else Life.DEAD
        except LaunchError:
            return Life.DEAD

    def _document(
        self, attempt: Attempt, job: TrainingJob | EvaluationJob, what: str, code: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "what": what,
            "code": dict(code),
            "python": self._python_of(job),
            "workdir": self._workdir_of(job),
            "runs_uri": attempt.job.runs.uri,
            "job_key": attempt.claim.job_key,
            "attempt": attempt.number,
            "token": attempt.claim.token,
            "storage": job.storage.to_document(),
            "link_timeout_s": job.limits.link_timeout_s,
        }

    def _deliver(self, attempt: Attempt, job: TrainingJob | EvaluationJob, bundle: Bundle) -> dict[str, Any]:
        """Bring the code to where the hosts find it; return what they are told of it."""
        if job.cluster.code is Code.SHARED:
            folder = _shared_code(attempt, self._workdir_of(job))
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


def _login(access: SshAccess, host: HostPlan) -> str:
    user, port = access.user_of(host), access.port_of(host)
    return f"{f'{user}@' if user else ''}{host.name}{f' port {port}' if port != 22 else ''}"


def _shared_code(attempt: Attempt, workdir: str | None) -> Path:
    return Path(str(workdir)) / attempt.claim.job_key / f"{attempt.number:0{WIDTH}d}" / "code"


def _code_again(attempt: Attempt, job: TrainingJob | EvaluationJob, workdir: str | None) -> dict[str, Any]:
    """Return where the code is that the attempt was started with."""
    if job.cluster.code is Code.SHARED:
        return {"how": "shared", "folder": str(_shared_code(attempt, workdir))}
    if job.cluster.code is Code.IMAGE:
        return {"how": "image"}
    digest = attempt.claim.code_digest
    return {"how": "bundle", "uri": f"{attempt.job.runs.uri}/_code/{digest}.zip", "digest": digest}


def _answer(host: HostPlan, done: Done) -> dict[str, Any]:
    """Return what a host answered; lines of other form are its login shell's.

    :raises LaunchError: it says why it cannot, or nothing.
    """
    for line in done.stdout.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("mxdist") == "answer":
            return said
        if isinstance(said, dict) and said.get("mxdist") == "error":
            retryable = bool(said.get("retryable", True))
            raise LaunchError(f"{host.name}: {said.get('message')}", hint=said.get("hint", ""), retryable=retryable)
    hint = (
        "Check cluster.python (or node_python of the connection): it has to be there, at the same path on every host."
    )
    raise LaunchError(f"{host.name} does not answer (exit code {done.returncode}): {done.last_words}", hint=hint)


def _error_of(host: HostPlan, found: Done | LaunchError) -> LaunchError | None:
    if isinstance(found, LaunchError):
        return found
    try:
        _answer(host, found)
    except LaunchError as error:
        return error
    return None


def _not_ended(attempt: Attempt, failed: Mapping[str, LaunchError], link_timeout_s: float) -> LaunchError:
    named = f"attempt {attempt.number} of {attempt.claim.job_key}"
    whys = {
        name: error.message.removeprefix("cannot reach ").removeprefix(f"{name}: ") for name, error in failed.items()
    }
    told = "\n  ".join(f"{name}: {why}" for name, why in whys.items())
    hints = dict.fromkeys(error.hint for error in failed.values() if error.hint)
    guard = (
        f"Ranks on a host that is cut off from its supervisor are ended there by their guard within "
        f"{link_timeout_s:g} s; cancel again to have it verified."
    )
    return LaunchError(
        f"{named}: it is not certain that all its processes have ended on {len(failed)} "
        f"host{'s' if len(failed) > 1 else ''}:\n  {told}",
        hint="".join(f"\n  {hint}" for hint in [*hints, guard]),
    )


def _left_to_guards(attempt: Attempt, link_timeout_s: float) -> bool:
    """Whether the attempt is over so long that even hosts out of reach have ended its ranks: no supervisor pings.

    One without a result is over as well when it is to end and nothing was heard of it for long: its first host is gone
    for good, and would block the job's key for ever. Were it to come back, nothing that it writes counts any more.
    """
    result = attempt.result()
    if result is not None:
        return time.time() - result.ended_at > link_timeout_s + _GUARD_S
    document = _document_of(attempt, attempt.supervisors.last()) or {"at": 0.0}
    heard_at = max(attempt.read_state().heartbeat, document["at"])
    return attempt.cancel_intent() is not None and time.time() - heard_at > max(_GIVEN_UP_S, link_timeout_s + _GUARD_S)


def _ever_started(attempt: Attempt) -> bool:
    """Whether a supervisor has ever claimed its place; a store that does not answer leaves it open: then yes."""
    try:
        return attempt.supervisors.last() > 0
    except StoreError:
        return True


def _document_of(attempt: Attempt, number: int) -> dict[str, Any] | None:
    for _, document in attempt.supervisors.read(after=number - 1) if number else ():
        return dict(document)
    return None


def _claimed_by_us(attempt: Attempt, incarnation: int, nonce: str) -> bool | None:
    """Return whether our supervisor holds the place, another does (False), or nobody (None)."""
    for number, document in attempt.supervisors.read(after=incarnation - 1):
        return number == incarnation and document.get("nonce") == f"secrets-{nonce}.json"
    return None
