"""Processes that do all they can to be forgotten are ended with their job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from world.conftest import Jobs, wait_until

from mxdist import processes
from mxdist.spec import JobState

DAEMON = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        with open(sys.argv[1] + "/daemon", "a") as file:
            print(os.getpid(), file=file)
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep({life_s})"], {{}})
    os.wait()
    while not os.path.exists(sys.argv[1] + "/go"):
        time.sleep(0.05)
"""


def nameless(jobs: Jobs) -> int:
    """Wait for the daemon that has nothing left of its job; return its process id."""
    pid = int(wait_until(lambda: jobs.marks("daemon"), "the daemon")[0])
    wait_until(lambda: Path(f"/proc/{pid}/environ").read_bytes() == b"", "its empty environment")
    return pid


def test_daemon_without_environment_session_or_parent_is_found_and_ended(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(DAEMON.format(life_s=100_000))).attempt
    pid = nameless(jobs)
    found = processes.read(pid)
    assert found is not None
    try:
        assert found.session not in jobs.rank_pids(attempt, 1)
        wait_until(lambda: pid in {process.pid for process in processes.find(attempt.claim.token)}, "its adoption")
        (jobs.folder / "go").touch()
        assert jobs.result(attempt).state is JobState.SUCCEEDED
        assert not processes.alive(pid, found.start_time)
    finally:
        processes.send(found, signal.SIGKILL)


def test_daemons_that_end_leave_no_zombies(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(DAEMON.format(life_s=0))).attempt
    pid = int(wait_until(lambda: jobs.marks("daemon"), "the daemon")[0])
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "its burial")
    (jobs.folder / "go").touch()

    assert jobs.result(attempt).state is JobState.SUCCEEDED
