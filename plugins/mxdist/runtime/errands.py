"""What a launcher asks of a host: start a supervisor here, say whether it lives, end what is left of a job.

``python -m mxdist.runtime.errands WHAT --document FD``, started by ``bootstrap``. Each answers with one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mxdist import processes
from mxdist.environment import SECRET_NAMES, SUPERVISOR_SECRETS, base_environment
from mxdist.errors import LaunchError, MxdistError
from mxdist.runtime.place import tail, write_json
from mxdist.runtime.wire import say

_START_TIMEOUT_S = 120.0
_TOLD = ("runs_uri", "job_key", "attempt", "token", "storage", "code", "workdir", "hosts", "here", "opener")


def supervisor(document: Mapping[str, Any]) -> dict[str, Any]:
    """Start the supervisor of an attempt, and wait until it has claimed its place or found it taken.

    Which of the two the launcher reads in the run store: the claim has the nonce ``secrets-<nonce>.json``.
    """
    folder = Path(document["folder"])
    write_json(folder / "attempt.json", {name: document.get(name) for name in _TOLD})
    secrets = write_secrets(folder, document)
    python = document.get("python") or sys.executable
    command = [python, "-m", "mxdist.runtime.supervisor", str(folder)]
    command += ["--incarnation", str(document["incarnation"]), "--secrets", secrets.name]
    environment = {
        **base_environment(os.environ),
        **(document.get("environment") or {}),
        **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
        processes.TOKEN_NAME: str(document["token"]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if document.get("again"):
        command += ["--again", document["again"]]
    if document.get("foreground"):
        _become([*command, "--foreground"], environment, folder)
    try:
        return {"exit_code": _started(command, environment, folder), "folder": str(folder)}
    finally:
        secrets.unlink(missing_ok=True)  # a supervisor that could not even be imported has left it


def life(document: Mapping[str, Any]) -> dict[str, Any]:
    """Say whether the supervisor lives, and which processes of the job there are here."""
    pid, started = document.get("pid"), document.get("start_time")
    return {
        "host_identity": processes.host_identity(),
        "alive": bool(pid and started and processes.alive(int(pid), int(started))),
        "processes": [process.pid for process in processes.find(document["token"])],
    }


def end(document: Mapping[str, Any]) -> dict[str, Any]:
    """End every process of the job here; with ``spare``, all but the supervisor ``pid``."""
    spared = {int(document["pid"])} if document.get("spare") and document.get("pid") else set()
    found = len(processes.find(document["token"]))
    processes.terminate(document["token"], grace_s=float(document.get("grace_s") or 0), exclude={os.getpid(), *spared})
    return {"host_identity": processes.host_identity(), "ended": found}


def write_secrets(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write the allowed secrets for one start; the supervisor reads the file and removes it."""
    path = folder / f"secrets-{document.get('nonce') or uuid.uuid4().hex}.json"
    allowed = {*SECRET_NAMES, *SUPERVISOR_SECRETS}
    given = document.get("secrets") or {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({name: value for name, value in given.items() if name in allowed and value}, file)
    return path


def _started(command: list[str], environment: dict[str, str], folder: Path) -> int:
    """Run the supervisor until it has detached itself; return how that went."""
    with (folder / "supervisor.log").open("ab") as log:
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, timeout=_START_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise LaunchError(f"the supervisor did not start within {_START_TIMEOUT_S:g} s.") from None
    if done.returncode:
        lines = tail(folder / "supervisor.log", 2000).decode(errors="replace").strip().splitlines()
        said = lines[-1] if lines else "it left an empty log."
        hint = f"Check the node environment ({command[0]}); the whole log is {folder / 'supervisor.log'}."
        raise LaunchError(f"the supervisor did not start (exit code {done.returncode}): {said}", hint=hint)
    return done.returncode


def _become(command: list[str], environment: dict[str, str], folder: Path) -> NoReturn:
    """Become the supervisor; what it says goes to the platform's own log."""
    os.chdir(folder)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.execve(command[0], command, environment)


ERRANDS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "supervisor": supervisor,
    "life": life,
    "end": end,
}


def main() -> None:
    """Do the errand, and answer."""
    with open(int(sys.argv[sys.argv.index("--document") + 1]), "rb") as file:
        document = json.loads(file.read())
    try:
        answer, code = say("answer", **ERRANDS[sys.argv[1]](document)), 0
    except (MxdistError, OSError) as error:
        told = error if isinstance(error, MxdistError) else LaunchError(str(error))
        answer, code = say("error", message=told.message, hint=told.hint, retryable=told.retryable), 1
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
