"""What goes wrong in a world over MPI is found and named as over Gloo: the same tests, with other ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from world.conftest import Jobs, log_of, wait_until
from world.test_failures import (
    TRAIN,
    test_failing_rank_leaves_its_traceback_in_the_log,
    test_failure_without_horovod_ends_the_other_ranks,
    test_first_failing_rank_is_named,
    test_killed_rank_is_restarted_within_the_budget,
    test_rank_killed_from_outside_is_named,
)
from world.test_stalls import (
    test_rank_busy_elsewhere_is_named_by_horovods_own_check,
    test_stopped_rank_is_named,
)
from world.toy import dataset, job_on

from mxdist import processes
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt

__all__ = [
    "dataset",
    "test_failing_rank_leaves_its_traceback_in_the_log",
    "test_failure_without_horovod_ends_the_other_ranks",
    "test_first_failing_rank_is_named",
    "test_killed_rank_is_restarted_within_the_budget",
    "test_rank_busy_elsewhere_is_named_by_horovods_own_check",
    "test_rank_killed_from_outside_is_named",
    "test_stopped_rank_is_named",
]


SCRIPT = """
    import os, time
    import horovod.mxnet as hvd, mxnet as mx
    hvd.init()
    total = hvd.allreduce(mx.nd.ones(1) * (hvd.rank() + 1), op=hvd.Sum, name="a").asscalar()
    folder, secret = os.environ["MXDIST_ATTEMPT_DIR"], os.environ["AWS_SESSION_TOKEN"]
    print(f"rank {hvd.rank()} of {hvd.size()}, mpi {hvd.mpi_enabled()}, gloo {hvd.gloo_enabled()}: {total:g} {secret}")
    print("cores", *sorted(os.sched_getaffinity(0)), flush=True)
    open(f"{folder}/here-{hvd.rank()}", "w").close()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.05)
"""


def commands_of(attempt: Attempt) -> dict[int, str]:
    """Return the command lines of an attempt's processes."""
    found = {}
    for process in processes.find(attempt.claim.token):
        found[process.pid] = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def mpirun_of(attempt: Attempt) -> int:
    """Return the process id of an attempt's mpirun."""
    (found,) = [pid for pid, command in commands_of(attempt).items() if command.startswith("mpirun ")]
    return found


def test_ranks_meet_over_mpi_each_on_its_cores(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(SCRIPT, ranks=2), secrets={"AWS_SESSION_TOKEN": "a-secret"}).attempt
    folder = jobs.attempt_dir(attempt)
    wait_until(lambda: len(list(folder.glob("here-*"))) == 2, "both ranks")
    commands, mpirun = commands_of(attempt), mpirun_of(attempt)
    environment = Path(f"/proc/{mpirun}/environ").read_bytes().split(b"\0")
    (folder / "go").touch()
    result = jobs.result(attempt)

    lines = log_of(attempt)
    assert result.state is JobState.SUCCEEDED, lines
    assert {f"[{rank}] rank {rank} of 2, mpi True, gloo False: 3 a-secret" for rank in (0, 1)} <= set(lines)
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) > 1:
        half = len(mine) // 2
        cores = {line for line in lines if "cores" in line}
        assert cores == {f"[{rank}] cores " + " ".join(map(str, mine[rank * half :][:half])) for rank in (0, 1)}
    assert not any("a-secret" in command for command in commands.values())
    assert not any(b"a-secret" in variable for variable in environment)


def training(dataset: dict[str, Any], **changes: Any) -> TrainingJob:
    """Return a training of mxdist's own loop over MPI."""
    return job_on(dataset, **{"parallelism": {"world_size": 2, "controller": "mpi"}, **changes})


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_training_goes_on_from_its_checkpoint(jobs: Jobs, dataset: dict[str, Any], stop: int) -> None:
    """The supervisor is asked to end, or killed: in both cases nothing of MPI is left, and nothing is trained twice."""
    job = training(dataset, epochs=300, checkpoints={"every_steps": 8})
    attempt = jobs.submit(job).attempt
    wait_until(lambda: attempt.read_state().step > 16, "some steps")
    os.kill(jobs.supervisor(attempt), stop)
    if stop == signal.SIGTERM:
        result = jobs.result(attempt)
        assert result.state is JobState.PREEMPTED
        attempt = jobs.submit(job).attempt
    else:
        wait_until(lambda: not processes.find(attempt.claim.token), "all processes to follow their supervisor")
        assert jobs.client.revive(attempt, {})
    result = jobs.result(attempt)
    assert (result.state, result.steps) == (JobState.SUCCEEDED, 1200), result.cause
    assert any("going on from step" in line for line in log_of(attempt))


def test_killed_rank_restarts_the_world(jobs: Jobs, dataset: dict[str, Any]) -> None:
    attempt = jobs.submit(training(dataset, epochs=300, checkpoints={"every_steps": 8})).attempt
    wait_until(lambda: attempt.read_state().step > 16, "some steps")
    os.kill(jobs.rank_pids(attempt, 2)[1], signal.SIGKILL)
    result = jobs.result(attempt)
    assert (result.state, result.restarts, result.steps) == (JobState.SUCCEEDED, 1, 1200), result.cause
    assert any("rank 1 was killed by SIGKILL" in line for line in log_of(attempt))


def test_killed_mpirun_is_named(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(TRAIN.format(act="pass"), ranks=2)).attempt
    wait_until(lambda: len(jobs.marks("steps")) == 2, "both ranks' first step")
    os.kill(mpirun_of(attempt), signal.SIGKILL)
    result = jobs.result(attempt)
    assert result.cause is not None
    assert (result.cause.rank, result.cause.exit_code) == (None, -9)
    assert "mpirun was killed by SIGKILL" in result.cause.message


def test_cancel_leaves_no_process(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(TRAIN.format(act="pass"), ranks=2)).attempt
    wait_until(lambda: len(jobs.marks("steps")) == 2, "both ranks' first step")
    result = jobs.client.cancel(attempt, by="somebody", reason="no longer needed")
    assert result.state is JobState.CANCELLED
    wait_until(lambda: not processes.find(attempt.claim.token), "everything to be gone")


def test_rank_that_never_comes_is_named(jobs: Jobs) -> None:
    script = """
        import os, time
        if os.environ["HOROVOD_RANK"] == "1":
            time.sleep(100_000)
        import horovod.mxnet as hvd
        hvd.init()
    """
    _, result = jobs.run(script, ranks=2, start_timeout_s=20)
    assert result.cause is not None
    assert (result.cause.kind, result.cause.rank) == ("start_timeout", 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "mpirun is not on the PATH of this host. Install Open MPI"),
        (lambda folder: program(folder / "mpirun", "echo no such network >&2; exit 7"), "code 7 .*: no such network"),
    ],
    ids=["missing", "failing"],
)
def test_mpirun_that_does_not_work(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], words: str
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    make(folder)
    monkeypatch.setenv("PATH", str(folder))
    _, result = jobs.run("pass", ranks=2)
    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert re.search(words, result.cause.message)


def program(path: Path, text: str) -> None:
    """Write a shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
