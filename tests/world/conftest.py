"""Real jobs: a run store in a folder, the local launcher, and scripts that misbehave."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from world.toy import dataset

from mxdist import processes
from mxdist.launch import JobClient, LocalLauncher, Submission
from mxdist.launch.client import log_lines
from mxdist.spec import TrainingJob, parse_job
from mxdist.store import Attempt, JobRun, Result, open_store

__all__ = ["dataset"]

GENEROUS_S = 240.0
"""A bound against hanging for ever; nothing depends on how long things really take."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = GENEROUS_S) -> Any:
    """Return the first true value of ``condition``."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")


@dataclass
class Jobs:
    """The jobs of one test."""

    folder: Path
    client: JobClient
    controller: str = "gloo"
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def launcher(self) -> LocalLauncher:
        """The launcher of the client."""
        assert isinstance(self.client.launcher, LocalLauncher)
        return self.client.launcher

    def job(self, script: str, *, ranks: int = 1, args: tuple[str, ...] = (), **limits: float) -> TrainingJob:
        """Return a job that runs ``script`` (its text)."""
        path = self.folder / "scripts" / "job.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(script))
        job = parse_job({
            "name": "test",
            "script": {"path": str(path), "args": [str(self.folder), *args]},
            "parallelism": {"world_size": ranks, "controller": self.controller},
            "limits": {"grace_s": 3, "max_restarts": 0, **limits},
        })  # fmt: skip
        assert isinstance(job, TrainingJob)
        return job

    def submit(self, job: TrainingJob, key: str = "job", secrets: Mapping[str, str] | None = None) -> Submission:
        """Submit a job."""
        submission = self.client.submit(job, key, secrets=secrets or {})
        self.attempts.append(submission.attempt)
        return submission

    def run(self, script: str, **options: Any) -> tuple[Attempt, Result]:
        """Submit a script and wait for its end."""
        attempt = self.submit(self.job(script, **options)).attempt
        return attempt, self.result(attempt)

    def result(self, attempt: Attempt) -> Result:
        """Wait for the end of an attempt, and for its supervisor to be gone."""
        result = wait_until(attempt.result, "the result")
        wait_until(lambda: not processes.find(attempt.claim.token), "the supervisor's end")
        assert isinstance(result, Result)
        return result

    def claim(self, job: TrainingJob, key: str = "job", *, after: int = 0) -> Attempt:
        """Claim an attempt and start nothing."""
        attempt = JobRun(self.client.runs, key).claim(job, after=after)
        self.attempts.append(attempt)
        return attempt

    def attempt_dir(self, attempt: Attempt) -> Path:
        """Return the scratch folder of an attempt."""
        return self.launcher.attempt_dir(attempt)

    def marks(self, name: str) -> list[str]:
        """Return what scripts have noted in the test's folder under ``name``, one entry a line."""
        path = self.folder / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def supervisor(self, attempt: Attempt) -> int:
        """Return the process id of the newest supervisor."""
        for _, document in attempt.supervisors.read(after=attempt.supervisors.last() - 1):
            return int(document["pid"])
        raise AssertionError("no supervisor has claimed its place")

    def rank_pids(self, attempt: Attempt, ranks: int) -> list[int]:
        """Wait until every rank is started; return their process ids."""

        def pids() -> list[int]:
            found = [rank["pid"] for rank in attempt.read_state().ranks if rank["exit_code"] is None]
            return found if len(found) == ranks else []

        found = wait_until(pids, f"{ranks} running ranks")
        assert isinstance(found, list)
        return found


def log_of(attempt: Attempt) -> list[str]:
    """Return the whole mirrored log, and check its numbering."""
    numbered = [line for _, lines in log_lines(attempt) for line in lines]
    assert [number for number, _ in numbered] == list(range(1, len(numbered) + 1))
    return [text for _, text in numbered]


@contextmanager
def jobs_in(folder: Path, *, controller: str = "gloo", python: str | None = None) -> Iterator[Jobs]:
    """Offer jobs with all their files in ``folder``; at the end no process of them may be left.

    :param python: of the ranks; default: as the environment says, else this one.
    """
    python = python or os.environ.get("MXDIST_NODE_PYTHON") or sys.executable
    runs = open_store(str(folder / "runs"))
    found = Jobs(folder, JobClient(runs, LocalLauncher(python=python, workdir=folder / "jobs")), controller)
    yield found
    left = [(attempt.number, processes.find(attempt.claim.token)) for attempt in found.attempts]
    for attempt in found.attempts:
        processes.terminate(attempt.claim.token, grace_s=0)
    assert [entry for entry in left if entry[1]] == []


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs of one test."""
    monkeypatch.delenv("MXDIST_WORKDIR", raising=False)
    with jobs_in(tmp_path) as found:
        yield found
