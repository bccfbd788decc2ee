"""What a supervisor does before it works: it takes its secrets, opens its attempt and claims its place."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdist import processes
from mxdist.environment import SUPERVISOR_SECRETS, base_environment
from mxdist.errors import NotFound
from mxdist.runtime.place import Place, read_json
from mxdist.runtime.reporter import LOW_PRIORITY
from mxdist.store import Attempt, Credentials, JobRun, open_store


@dataclass(frozen=True)
class Given:
    """What the launcher has told: the attempt's ``attempt.json``, and secrets, some for the supervisor alone."""

    told: Mapping[str, Any]
    secrets: Mapping[str, str]


def yield_to_ranks() -> None:
    """Let the ranks have the processors first.

    Where the kernel groups processes by session (its default outside of containers), a thread's nice value counts only
    within its session, and the session has a value of its own. The ranks get sessions of their own.
    """
    _set_session_priority(LOW_PRIORITY)


def stop_yielding() -> None:
    """Take an equal share of the processors again: the ranks have ended, and somebody waits for the result."""
    _set_session_priority(0)


def _set_session_priority(nice: int) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def take_secrets(path: Path) -> dict[str, str]:
    """Return the secrets that the launcher wrote, and remove the file; empty if there is none."""
    try:
        secrets = json.loads(path.read_text())
    except OSError:
        return {}
    path.unlink(missing_ok=True)
    return {str(name): str(value) for name, value in secrets.items()}


def open_place(folder: Path, secrets: Mapping[str, str]) -> tuple[Place, Attempt, dict[str, Any]]:
    """Return what the launcher prepared in a scratch folder; with all that it told in ``attempt.json``.

    :raises NotFound: it prepared nothing there, or the attempt is not in the run store.
    """
    told = read_json(folder / "attempt.json")
    if not told:
        raise NotFound(f"{folder} holds no attempt.json")
    storage = told["storage"]
    runs = open_store(
        told["runs_uri"],
        endpoint_url=storage["endpoint_url"],
        region=storage["region"],
        credentials=Credentials.from_environment(secrets) if "AWS_ACCESS_KEY_ID" in secrets else None,
    )
    attempt = JobRun(runs, told["job_key"]).attempt(told["attempt"])
    for_ranks = {name: value for name, value in secrets.items() if name not in SUPERVISOR_SECRETS}
    return Place(folder, told["token"], told["attempt"], base_environment(os.environ), for_ranks), attempt, told


def next_incarnation(attempt: Attempt, asked: int, again: str | None) -> int:
    """Return which supervisor of the attempt this one is to be.

    A batch job that its platform starts again holds the newest place itself, from its last run, which is over: then it
    is the next. If somebody else holds it, this job comes too late, and finds its place taken.

    :param asked: which one the launcher asked for.
    :param again: how the nonces of such earlier claims begin; None: there are none.
    """
    last = attempt.supervisors.last()
    if again is None or last < asked:
        return asked
    ours = any(str(document.get("nonce")).startswith(again) for _, document in attempt.supervisors.read(after=last - 1))
    return last + 1 if ours else asked


def claim_place(attempt: Attempt, incarnation: int, nonce: str) -> bool:
    """Become the supervisor with this number; return False if another process is.

    :param nonce: tells the launcher that started this process which of them it was.
    """
    document = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "host_identity": processes.host_identity(),
        "start_time": processes.start_time(os.getpid()),
        "at": time.time(),
        "nonce": nonce,
    }
    return attempt.supervisors.append(incarnation, document)
