"""Disks that are full: the scratch folder's, and the run store's."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from world.conftest import Jobs, wait_until

from mxdist import processes
from mxdist.errors import LaunchError
from mxdist.launch import Life
from mxdist.spec import JobState
from mxdist.store import JobRun

FILL = """
    import os, sys, time
    with open(os.environ["MXDIST_ATTEMPT_DIR"] + "/ballast", "wb", buffering=0) as ballast:
        for size in (1 << 16, 1):
            try:
                while True:
                    ballast.write(b"x" * size)
            except OSError:
                pass
    open(sys.argv[1] + "/full", "a").write("full\\n")
    {then}
"""

SCENARIO = """
import json, os, subprocess, sys, time
from pathlib import Path
from mxdist.launch import JobClient, LocalLauncher
from mxdist.spec import parse_job
from mxdist.store import open_store
folder, python, job, cancel = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] == "cancel"
(folder / "jobs").mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder / "jobs")], check=True)
client = JobClient(open_store(str(folder / "runs")), LocalLauncher(python=python, workdir=folder / "jobs"))
attempt = client.submit(parse_job(job), "job").attempt
while not (folder / "full").exists() and attempt.result() is None:
    time.sleep(0.1)
if cancel:
    client.cancel(attempt, by="user", reason="test")
while attempt.result() is None and client.launcher.life(attempt).value == "alive":
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("then", "act", "state", "words"),
    [
        ("pass", "wait", JobState.SUCCEEDED, ""),
        ("sys.exit(3)", "wait", JobState.FAILED, "is full"),
        ("time.sleep(100_000)", "cancel", JobState.CANCELLED, "cancelled by user"),
    ],
    ids=["success", "failure", "cancel"],
)
def test_full_scratch_disk_keeps_no_job_from_its_true_result(
    jobs: Jobs, then: str, act: str, state: JobState, words: str
) -> None:
    job = jobs.job(FILL.format(then=then))
    python = str(jobs.launcher.plan(job, "job", runs_uri="/").python)
    # A disk of its own, in a mount namespace of its own: no privilege is needed, and nothing else is filled.
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", SCENARIO]
    command += [str(jobs.folder), python, json.dumps(job.to_document()), act]
    environment = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    attempt = JobRun(jobs.client.runs, "job").latest()
    assert attempt is not None, done.stderr
    jobs.attempts.append(attempt)
    result = attempt.result()

    assert result is not None, "the supervisor has died without a word"
    assert jobs.marks("full") == ["full"], (result, done.stderr)
    assert result.state is state
    assert result.cause is None if not words else words in str(result.cause)
    wait_until(lambda: not processes.find(attempt.claim.token), "the supervisor's end")


@contextmanager
def no_space(*pids: int) -> Iterator[None]:
    """Let these processes write no more byte to any file."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            if processes.start_time(pid):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def test_cancel_that_a_full_run_store_refuses_ends_the_job_by_signal_and_says_so(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job("import time\ntime.sleep(100_000)")).attempt
    jobs.rank_pids(attempt, 1)
    with no_space(os.getpid(), jobs.supervisor(attempt)):
        with pytest.raises(LaunchError, match="was ended by signal, but that is not recorded") as caught:
            jobs.client.cancel(attempt, by="user", reason="test", wait_s=5)
        assert processes.find(attempt.claim.token) == []

    assert "cancel.json" in str(caught.value)
    assert "attempt 1 of job" in str(caught.value)
    assert attempt.cancel_intent() is None
    assert jobs.launcher.life(attempt) is Life.DEAD
    assert jobs.client.cancel(attempt, by="user", reason="again").state is JobState.CANCELLED


def test_cancel_that_is_refused_names_what_still_runs_elsewhere(jobs: Jobs) -> None:
    attempt = jobs.claim(jobs.job("pass"))
    other = {"pid": 1, "start_time": 1, "host": "node7", "host_identity": "another", "at": 4e9, "nonce": ""}
    attempt.supervisors.append(1, other)

    with no_space(os.getpid()), pytest.raises(LaunchError, match="attempt 1 of job still runs: .*runs on node7"):
        jobs.client.cancel(attempt, by="user", reason="test", wait_s=0)
