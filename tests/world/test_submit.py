"""One job key, one job: whoever dies while submitting, however many submit, and wherever they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from world.conftest import Jobs, wait_until

from mxdist import processes
from mxdist.errors import LaunchError, SpecError
from mxdist.launch import Life, collect
from mxdist.spec import JobState
from mxdist.store import JobRun

COUNTED = """
    import sys, time
    with open(sys.argv[1] + "/started", "a") as file:
        print("run", file=file)
    {then}
"""
FOREVER = COUNTED.format(then="time.sleep(100_000)")
BRIEF = COUNTED.format(then="pass")

SUBMIT = """
import sys
from pathlib import Path
from mxdist.launch import JobClient, LocalLauncher
from mxdist.spec import parse_job
from mxdist.store import open_store
import json
folder, python, job = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
client = JobClient(open_store(str(folder / "runs")), LocalLauncher(python=python, workdir=folder / "jobs"))
submission = client.submit(parse_job(job), "job")
print(submission.how, submission.attempt.number, flush=True)
"""


def test_second_submission_reattaches(jobs: Jobs) -> None:
    job = jobs.job(FOREVER)
    first, second = jobs.submit(job), jobs.submit(job)

    assert (first.how, second.how) == ("started", "reattached")
    assert first.attempt.claim == second.attempt.claim
    wait_until(lambda: jobs.marks("started"), "the script")
    jobs.client.cancel(first.attempt, by="user", reason="test")
    assert jobs.marks("started") == ["run"]


def test_result_is_returned_until_it_was_handed_over(jobs: Jobs) -> None:
    job = jobs.job(BRIEF)
    first = jobs.submit(job)
    jobs.result(first.attempt)

    again = jobs.submit(job)
    assert (again.how, again.attempt.number) == ("finished", 1)
    again.attempt.hand_over()

    cleared = jobs.submit(job)
    assert (cleared.how, cleared.attempt.number, cleared.attempt.claim.origin) == ("started", 2, 2)
    jobs.result(cleared.attempt)
    assert jobs.marks("started") == ["run", "run"]


def test_worker_killed_between_claim_and_launch(jobs: Jobs) -> None:
    job = jobs.job(BRIEF)
    claimed = jobs.claim(job)

    found = jobs.submit(job)
    assert (found.attempt.number, found.how) == (1, "started")
    assert found.attempt.claim.token == claimed.claim.token
    assert jobs.result(found.attempt).state is JobState.SUCCEEDED
    assert jobs.marks("started") == ["run"]


def test_what_a_killed_submitter_left_in_the_scratch_folder_is_removed(jobs: Jobs) -> None:
    job = jobs.job(BRIEF)
    folder = jobs.attempt_dir(jobs.claim(job))
    (folder / ".code-killed").mkdir(parents=True)
    for name in ("secrets-killed.json", ".attempt-killed", "secrets-now.json"):
        (folder / name).write_text("{}")
    for name in ("secrets-killed.json", ".attempt-killed"):
        os.utime(folder / name, (0, 0))
    jobs.result(jobs.submit(job).attempt)
    names = {path.name for path in folder.iterdir()}

    assert {"code", "attempt.json", "secrets-now.json"} <= names, "a start that is under way keeps its own"
    assert not names & {".code-killed", "secrets-killed.json", ".attempt-killed"}


def test_submitters_at_once_start_one_job(jobs: Jobs) -> None:
    import json

    job = jobs.job(FOREVER)
    python = str(jobs.launcher.plan(job, "job", runs_uri="/").python)
    command = [sys.executable, "-c", SUBMIT, str(jobs.folder), python, json.dumps(job.to_document())]
    environment = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[1])}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = sorted(process.communicate()[0].strip() for process in started)
    attempt = jobs.submit(job).attempt

    assert told == ["reattached 1", "reattached 1", "started 1"]
    assert attempt.supervisors.last() == 1
    wait_until(lambda: jobs.marks("started"), "the script")
    jobs.client.cancel(attempt, by="user", reason="test")
    assert jobs.marks("started") == ["run"]


def test_two_supervisors_of_one_incarnation_one_wins(jobs: Jobs) -> None:
    job = jobs.job(FOREVER)
    attempt = jobs.claim(job)
    barrier = threading.Barrier(2)

    def start(_: int) -> bool:
        barrier.wait()
        return jobs.launcher.start(attempt, collect(job), incarnation=1, secrets={})

    with ThreadPoolExecutor(2) as pool:
        won = sorted(pool.map(start, range(2)))

    assert won == [False, True]
    wait_until(lambda: jobs.marks("started"), "the script")
    jobs.client.cancel(attempt, by="user", reason="test")
    assert jobs.marks("started") == ["run"]


def test_submitter_killed_while_the_supervisor_starts(jobs: Jobs) -> None:
    import json

    job = jobs.job(FOREVER)
    python = str(jobs.launcher.plan(job, "job", runs_uri="/").python)
    command = [sys.executable, "-c", SUBMIT, str(jobs.folder), python, json.dumps(job.to_document())]
    environment = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as submitter:
        attempt = wait_until(JobRun(jobs.client.runs, "job").latest, "the claim")
        submitter.send_signal(signal.SIGKILL)

    jobs.submit(job)
    wait_until(lambda: jobs.marks("started"), "the script")
    jobs.client.cancel(attempt, by="user", reason="test")
    assert jobs.marks("started") == ["run"]


def test_killed_supervisor_takes_its_ranks_along_and_is_revived(jobs: Jobs) -> None:
    script = """
        import os, sys, time
        with open(sys.argv[1] + "/started", "a") as file:
            print(os.getpid(), file=file)
        while not os.path.exists(sys.argv[1] + "/go"):
            time.sleep(0.05)
    """
    attempt = jobs.submit(jobs.job(script, ranks=2, max_restarts=2)).attempt
    ranks = jobs.rank_pids(attempt, 2)
    wait_until(lambda: len(jobs.marks("started")) == 2, "both ranks")
    os.kill(jobs.supervisor(attempt), signal.SIGKILL)
    wait_until(lambda: not any(processes.start_time(pid) for pid in ranks), "the ranks' end")

    assert jobs.launcher.life(attempt) is Life.DEAD
    assert jobs.client.revive(attempt)
    wait_until(lambda: len(jobs.marks("started")) == 4, "both ranks again")
    (jobs.folder / "go").touch()
    result = jobs.result(attempt)

    assert (result.state, result.restarts) == (JobState.SUCCEEDED, 1)
    assert attempt.supervisors.last() == 2
    assert jobs.client.revive(attempt), "a finished attempt needs no reviving"
    assert attempt.supervisors.last() == 2


def test_supervisors_that_die_use_up_the_restarts(jobs: Jobs) -> None:
    job = jobs.job(FOREVER, max_restarts=1)
    attempt = jobs.submit(job).attempt
    for started in (1, 2):
        wait_until(lambda count=started: len(jobs.marks("started")) == count, "the script")
        os.kill(jobs.supervisor(attempt), signal.SIGKILL)
        wait_until(lambda: jobs.launcher.life(attempt) is Life.DEAD, "the supervisor's end")
        assert jobs.client.revive(attempt)

    result = jobs.result(attempt)
    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert result.cause.kind == "lost"
    assert jobs.marks("started") == ["run", "run"]


def test_submit_revives_a_dead_supervisor(jobs: Jobs) -> None:
    job = jobs.job(FOREVER, max_restarts=1)
    attempt = jobs.submit(job).attempt
    jobs.rank_pids(attempt, 1)
    os.kill(jobs.supervisor(attempt), signal.SIGKILL)
    wait_until(lambda: jobs.launcher.life(attempt) is Life.DEAD, "the supervisor's end")

    again = jobs.submit(job)
    assert (again.how, again.attempt.number) == ("reattached", 1)
    assert jobs.launcher.life(attempt) is Life.ALIVE
    jobs.client.cancel(attempt, by="user", reason="test")


def test_newer_attempt_fences_out_the_older(jobs: Jobs) -> None:
    job = jobs.job(FOREVER)
    old = jobs.submit(job).attempt
    jobs.rank_pids(old, 1)
    jobs.claim(job, after=1)

    wait_until(lambda: not processes.find(old.claim.token), "the old attempt's end")
    assert old.result() is None, "an attempt that was replaced says nothing"


def test_missing_node_python_is_told_before_anything_is_claimed(jobs: Jobs) -> None:
    job = jobs.job(BRIEF)
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"python": "/nowhere/python"})})

    with pytest.raises(LaunchError, match="there is no Python at /nowhere/python"):
        jobs.submit(job)
    assert JobRun(jobs.client.runs, "job").latest() is None


def test_python_that_cannot_run_mxdist_is_told_with_its_reason(jobs: Jobs) -> None:
    job = jobs.job(BRIEF)
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"python": "/usr/bin/false"})})
    jobs.attempts.append(jobs.claim(job))

    with pytest.raises(LaunchError, match="did not start"):
        jobs.submit(job)


def test_missing_script_is_told_before_anything_is_claimed(jobs: Jobs) -> None:
    job = jobs.job(BRIEF)
    assert job.script is not None
    job = job.model_copy(update={"script": job.script.model_copy(update={"path": "/nowhere/train.py"})})

    with pytest.raises(SpecError, match=r"script\.path: there is no file /nowhere/train\.py"):
        jobs.submit(job)
    assert JobRun(jobs.client.runs, "job").latest() is None
