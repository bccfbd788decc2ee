"""The local launcher: a job's supervisor is a detached process on this host that outlives whoever started it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxdist import processes
from mxdist.errors import LaunchError, StoreError
from mxdist.launch.base import Launcher, Life
from mxdist.launch.bundle import Bundle
from mxdist.launch.layout_check import check_cuts
from mxdist.launch.plan import SECRET_NAMES, Plan, base_environment, build_plan, supervisor_command
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.store import Attempt
from mxdist.store.sequence import WIDTH

HEARTBEAT_LOST_S = 60.0
"""A supervisor on another host is taken for dead when its heartbeat is older than this."""

_START_TIMEOUT_S = 120.0
_LEFT_BEHIND_S = 600.0  # what a start has written for itself is needed for less than this
_LOG_TAIL_BYTES = 2_000


def default_workdir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that holds the scratch folders of all jobs."""
    if environment.get("MXDIST_WORKDIR"):
        return Path(environment["MXDIST_WORKDIR"])
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "mxdist" / "jobs"


class LocalLauncher(Launcher):
    """Jobs on this host.

    :param python: Python of the node environment, unless the job names one; default: ``$MXDIST_NODE_PYTHON``.
    :param workdir: the folder of all scratch folders, unless the job names one; default: ``$MXDIST_WORKDIR`` or
        ``~/.local/state/mxdist/jobs``.
    """

    def __init__(self, *, python: str | None = None, workdir: str | Path | None = None) -> None:
        self._python = python
        self._workdir = workdir

    def plan(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> Plan:
        return build_plan(
            job,
            job_key,
            runs_uri=runs_uri,
            python=self._python_of(job),
            workdir=str(self._workdir_of(job)),
            cores=sorted(os.sched_getaffinity(0)),
        )

    def check(self, job: TrainingJob | EvaluationJob) -> None:
        if isinstance(job, TrainingJob):
            check_cuts(job, self._python_of(job))

    def attempt_dir(self, attempt: Attempt) -> Path:
        """Return the scratch folder of ``attempt``."""
        job = attempt.claim.parsed()
        return self._workdir_of(job) / attempt.claim.job_key / f"{attempt.number:0{WIDTH}d}"

    def start(self, attempt: Attempt, bundle: Bundle, *, incarnation: int, secrets: Mapping[str, str]) -> bool:
        python = self._python_of(attempt.claim.parsed())
        folder, secrets_path = self._prepare(attempt, bundle, secrets)
        command = [*supervisor_command(python, str(folder)), "--incarnation", str(incarnation)]
        command += ["--secrets", secrets_path.name]
        environment = base_environment(os.environ) | {
            processes.TOKEN_NAME: attempt.claim.token,
            "PYTHONPATH": str(folder / "code"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            code = _run(command, environment, folder)
        finally:
            secrets_path.unlink(missing_ok=True)
        ours = _claimed_by_us(attempt, incarnation, secrets_path.name)
        if ours is None:
            raise LaunchError(
                f"the supervisor of {attempt.claim.job_key} did not start (exit code {code}): {_tail(folder)}",
                hint=f"Check the node environment ({python}); the whole log is {folder / 'supervisor.log'}.",
            )
        return ours

    def life(self, attempt: Attempt) -> Life:
        document = _newest_supervisor(attempt)
        if document is None:
            return Life.NEVER
        if document["host_identity"] == processes.host_identity():
            alive = processes.alive(document["pid"], document["start_time"])
        else:
            fresh = time.time() - max(attempt.read_state().heartbeat, document["at"]) < HEARTBEAT_LOST_S
            alive = fresh and attempt.result() is None
        return Life.ALIVE if alive else Life.DEAD

    def kill(self, attempt: Attempt, *, grace_s: float) -> None:
        try:
            document = _newest_supervisor(attempt)
        except StoreError:  # what runs here can be ended without it
            document = None
        if document and document["host_identity"] != processes.host_identity() and self.life(attempt) is Life.ALIVE:
            raise LaunchError(
                f"attempt {attempt.number} of {attempt.claim.job_key} runs on {document['host']}, out of reach.",
                hint="Cancel it there, or wait until its supervisor has seen the cancel intent.",
            )
        processes.terminate(attempt.claim.token, grace_s=grace_s, exclude=(os.getpid(),))

    def _prepare(self, attempt: Attempt, bundle: Bundle, secrets: Mapping[str, str]) -> tuple[Path, Path]:
        """Make the scratch folder; return it, and the file of the secrets."""
        folder, job = self.attempt_dir(attempt), attempt.claim.parsed()
        document = {
            "runs_uri": attempt.job.store.uri.removesuffix(f"/{attempt.claim.job_key}"),
            "job_key": attempt.claim.job_key,
            "attempt": attempt.number,
            "token": attempt.claim.token,
            "storage": job.storage.to_document(),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            bundle.write(folder / "code")
            _remove_left_behind(folder)
            partial = folder / f".attempt-{uuid.uuid4().hex}"
            partial.write_text(json.dumps(document, indent=1))
            partial.rename(folder / "attempt.json")
            return folder, _write_secrets(folder, secrets)
        except OSError as error:
            raise LaunchError(f"cannot prepare {folder}: {error}", hint="Check free space and permissions.") from error

    def _python_of(self, job: TrainingJob | EvaluationJob) -> str:
        python = job.cluster.python or self._python or os.environ.get("MXDIST_NODE_PYTHON")
        if not python:
            raise LaunchError(
                "no Python of a node environment (with mxnet and horovod) is known.",
                hint="Set cluster.python in the job, node_python in the connection, or MXDIST_NODE_PYTHON.",
                retryable=False,
            )
        if not os.access(python, os.X_OK):
            raise LaunchError(
                f"there is no Python at {python}.", hint="Check cluster.python or MXDIST_NODE_PYTHON.", retryable=False
            )
        return python

    def _workdir_of(self, job: TrainingJob | EvaluationJob) -> Path:
        return Path(job.cluster.workdir or self._workdir or default_workdir()).absolute()


def _remove_left_behind(folder: Path) -> None:
    """Remove what a launcher has left that was killed before its supervisor took it."""
    for path in [*folder.glob(".attempt-*"), *folder.glob("secrets-*.json")]:
        with contextlib.suppress(FileNotFoundError):  # another launcher may be here as well
            if time.time() - path.stat().st_mtime > _LEFT_BEHIND_S:
                path.unlink()


def _write_secrets(folder: Path, secrets: Mapping[str, str]) -> Path:
    """Write the allowed secrets for one start; the supervisor reads the file and removes it."""
    path = folder / f"secrets-{uuid.uuid4().hex}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({name: value for name, value in secrets.items() if name in SECRET_NAMES and value}, file)
    return path


def _run(command: list[str], environment: dict[str, str], folder: Path) -> int:
    """Run the supervisor until it has detached itself: its exit then says how the start went."""
    with (folder / "supervisor.log").open("ab") as log:
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                timeout=_START_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1
        except OSError as error:
            raise LaunchError(f"cannot run {command[0]}: {error}", retryable=False) from error
    return done.returncode


def _claimed_by_us(attempt: Attempt, incarnation: int, nonce: str) -> bool | None:
    """Return whether our supervisor holds the place, another does (False), or nobody (None)."""
    for number, document in attempt.supervisors.read(after=incarnation - 1):
        return number == incarnation and document.get("nonce") == nonce
    return None


def _newest_supervisor(attempt: Attempt) -> dict[str, Any] | None:
    number = attempt.supervisors.last()
    for _, document in attempt.supervisors.read(after=number - 1) if number else ():
        return dict(document)
    return None


def _tail(folder: Path) -> str:
    try:
        data = (folder / "supervisor.log").read_bytes()[-_LOG_TAIL_BYTES:]
    except OSError:
        return "it left no log."
    lines = data.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it left an empty log."
