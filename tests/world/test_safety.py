"""What a job may know, where it may listen, and what an outage of the run store may do to it: nothing."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from world.conftest import Jobs, log_of, wait_until

from mxdist import processes
from mxdist.launch import Life
from mxdist.spec import JobState

CANARY = "canary-5f1c"

SHOW = """
    import json, os, sys, time
    with open(sys.argv[1] + "/environment.partial", "w") as file:
        json.dump(dict(os.environ), file)
    os.rename(sys.argv[1] + "/environment.partial", sys.argv[1] + "/environment")
    time.sleep(100_000)
"""


def test_secrets_reach_the_ranks_and_nothing_else(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", CANARY)
    monkeypatch.setenv("SOME_TOKEN", CANARY)
    secrets = {"AWS_SECRET_ACCESS_KEY": CANARY, "NOT_ALLOWED": CANARY}
    attempt = jobs.submit(jobs.job(SHOW), secrets=secrets).attempt
    wait_until((jobs.folder / "environment").exists, "the environment")
    environment = json.loads((jobs.folder / "environment").read_text())
    job_processes = processes.find(attempt.claim.token)
    commands = [Path(f"/proc/{process.pid}/cmdline").read_text() for process in job_processes]
    jobs.client.cancel(attempt, by="user", reason="test")

    assert [name for name, value in environment.items() if value == CANARY] == ["AWS_SECRET_ACCESS_KEY"]
    assert len(commands) == 2
    assert CANARY not in "".join(commands)
    kept = [path for root in ("runs", "jobs") for path in (jobs.folder / root).rglob("*") if path.is_file()]
    assert kept
    assert [path for path in kept if CANARY.encode() in path.read_bytes()] == []
    assert jobs.attempt_dir(attempt).stat().st_mode & 0o777 == 0o700


def test_node_side_runs_from_the_bundle(jobs: Jobs) -> None:
    script = """
        import mxdist, helper, os, sys
        print("package", mxdist.__file__)
        print("script", __file__)
        print("helper", helper.VALUE)
        print("folder", os.getcwd())
    """
    (jobs.folder / "scripts").mkdir()
    (jobs.folder / "scripts" / "helper.py").write_text("VALUE = 42")
    attempt, _ = jobs.run(script)
    code, lines = jobs.attempt_dir(attempt) / "code", log_of(attempt)
    assert f"[0] package {code}/mxdist/__init__.py" in lines
    assert f"[0] script {code}/user/job.py" in lines
    assert "[0] helper 42" in lines
    assert f"[0] folder {jobs.folder}/scripts" in lines


def test_everything_listens_on_loopback_only(jobs: Jobs) -> None:
    script = """
        import sys, time
        import horovod.mxnet as hvd
        hvd.init()
        open(sys.argv[1] + "/ready", "a").write("ready\\n")
        time.sleep(100_000)
    """
    attempt = jobs.submit(jobs.job(script, ranks=2)).attempt
    wait_until(lambda: len(jobs.marks("ready")) == 2, "both ranks")
    found = processes.find(attempt.claim.token)
    inodes = {inode for process in found for inode in _sockets(process.pid)}
    listening = [line for name in ("tcp", "tcp6") for line in _listening(name) if line[1] in inodes]
    jobs.client.cancel(attempt, by="user", reason="test")

    assert listening, "the rendezvous at least"
    assert {address for address, _ in listening} == {"0100007F"}


def test_outage_of_the_run_store_does_not_end_a_training(jobs: Jobs) -> None:
    script = """
        import os, sys, time
        open(sys.argv[1] + "/ready", "a").write("ready\\n")
        while not os.path.exists(sys.argv[1] + "/go"):
            time.sleep(0.05)
        print("trained")
        open(sys.argv[1] + "/trained", "a").write("trained\\n")
    """
    attempt = jobs.submit(jobs.job(script)).attempt
    wait_until(lambda: jobs.marks("ready"), "the rank")
    runs, away = jobs.folder / "runs", jobs.folder / "away"
    runs.rename(away)
    runs.write_text("a file where a folder should be: every write fails")
    (jobs.folder / "go").touch()
    outcome = jobs.attempt_dir(attempt) / "outcome.json"
    wait_until(lambda: jobs.marks("trained") and outcome.exists(), "the end of training")
    runs.unlink()
    away.rename(runs)
    result = jobs.result(attempt)

    assert result.state is JobState.SUCCEEDED
    assert "[0] trained" in log_of(attempt)


def test_supervisor_killed_before_its_result_is_followed_by_one_that_publishes(jobs: Jobs) -> None:
    script = """
        import sys
        open(sys.argv[1] + "/trained", "a").write("trained\\n")
    """
    job = jobs.job(script, max_restarts=1)
    attempt = jobs.submit(job).attempt
    jobs.result(attempt)
    attempt.store.delete(["result.json"])  # as if it had been killed between its outcome and its result
    wait_until(lambda: jobs.launcher.life(attempt) is Life.DEAD, "the supervisor's end")
    assert jobs.client.revive(attempt)

    assert jobs.result(attempt).state is JobState.SUCCEEDED
    assert jobs.marks("trained") == ["trained"], "trained once, published by the second"


def test_cancelled_while_the_next_world_waits(jobs: Jobs) -> None:
    script = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    attempt = jobs.submit(jobs.job(script, max_restarts=1000)).attempt
    wait_until(lambda: attempt.read_state().world >= 2, "a restart")

    assert jobs.client.cancel(attempt, by="user", reason="test").state is JobState.CANCELLED


def test_ranks_have_the_processors_first(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job("import time\ntime.sleep(100_000)")).attempt
    rank, supervisor = jobs.rank_pids(attempt, 1)[0], jobs.supervisor(attempt)
    session_nice = [_session_nice(pid) for pid in (rank, supervisor)]
    own_nice = os.getpriority(os.PRIO_PROCESS, rank)
    wait_until(lambda: 15 in _thread_nices(supervisor), "a thread that yields")
    jobs.client.cancel(attempt, by="user", reason="test")

    assert session_nice == ([0, 15] if Path("/proc/self/autogroup").exists() else [None, None])
    assert own_nice == os.getpriority(os.PRIO_PROCESS, 0)


def test_waits_for_nobody_once_the_ranks_have_ended(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    barriers = jobs.folder / "barriers"
    barriers.mkdir()
    monkeypatch.setenv("MXDIST_BARRIERS", str(barriers))
    hold = barriers / "job.supervisor-before-result.hold"
    hold.touch()
    attempt = jobs.submit(jobs.job("pass")).attempt
    wait_until((barriers / "job.supervisor-before-result.reached").exists, "the barrier")
    nice = _session_nice(jobs.supervisor(attempt))
    hold.unlink()

    assert jobs.result(attempt).state is JobState.SUCCEEDED
    assert nice in (0, None), "somebody waits for the result"


def _session_nice(pid: int) -> int | None:
    """Return the nice value of a process's whole session, where the kernel has one."""
    path = Path(f"/proc/{pid}/autogroup")
    return int(path.read_text().split()[-1]) if path.exists() else None


def _thread_nices(pid: int) -> set[int]:
    """Return the nice values of a process's threads; a thread that ends meanwhile does not count."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getpriority(os.PRIO_PROCESS, int(name)))
    return found


def _sockets(pid: int) -> set[str]:
    links = [path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}


def _listening(name: str) -> list[tuple[str, str]]:
    rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [(row[1].partition(":")[0], row[9]) for row in rows if row[3] == "0A"]
