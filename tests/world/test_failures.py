"""Whatever a rank does, the first failing one is named, the others are gone, and a result is there."""

from __future__ import annotations

import os
import signal

import pytest
from world.conftest import Jobs, log_of, wait_until

from mxdist.spec import JobState

TRAIN = """
    import os, signal, sys, time
    import horovod.mxnet as hvd, mxnet as mx
    hvd.init()
    for step in range(100_000):
        mx.nd.waitall()
        hvd.allreduce(mx.nd.ones(4), name="gradient").asnumpy()
        if step == 0:
            open(sys.argv[1] + "/steps", "a").write("step\\n")
        if step == 5 and hvd.rank() == 1:
            {act}
"""


@pytest.mark.parametrize(
    ("act", "code", "words"),
    [
        pytest.param("os._exit(3)", 3, "rank 1 exited with code 3", id="exit"),
        pytest.param("sys.exit(4)", 4, "rank 1 exited with code 4", id="orderly exit"),
        pytest.param("raise ValueError('no such thing')", 1, "ValueError: no such thing", id="exception"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -9, "killed by SIGKILL", id="kill"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", -11, "killed by SIGSEGV", id="segmentation fault"),
        pytest.param("os.abort()", -6, "killed by SIGABRT", id="abort"),
    ],
)
def test_first_failing_rank_is_named(jobs: Jobs, act: str, code: int, words: str) -> None:
    _, result = jobs.run(TRAIN.format(act=act), ranks=2)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert (result.cause.rank, result.cause.exit_code) == (1, code)
    assert words in result.cause.message


@pytest.mark.parametrize(
    ("act", "kind", "retryable"),
    [
        pytest.param("hvd.alreduce", "user_error", False, id="typo"),
        pytest.param("len(5)", "user_error", False, id="type"),
        pytest.param("raise OSError('no route to host')", "rank_exit", True, id="outage"),
        pytest.param("raise RuntimeError('TypeError: said somebody else')", "rank_exit", True, id="quoted"),
    ],
)
def test_error_that_the_next_try_would_meet_again_is_not_worth_one(
    jobs: Jobs, act: str, kind: str, retryable: bool
) -> None:
    _, result = jobs.run(TRAIN.format(act=act), ranks=2)

    assert result.cause is not None
    assert (result.cause.rank, result.cause.kind, result.cause.retryable) == (1, kind, retryable), result.cause


def test_failure_without_horovod_ends_the_other_ranks(jobs: Jobs) -> None:
    script = """
        import os, time
        if os.environ["HOROVOD_RANK"] == "2":
            raise SystemExit(3)
        time.sleep(100_000)
    """
    attempt, result = jobs.run(script, ranks=3)

    assert result.cause is not None
    assert (result.cause.kind, result.cause.rank, result.cause.exit_code) == ("rank_exit", 2, 3)
    codes = {rank["rank"]: rank["exit_code"] for rank in attempt.read_state().ranks}
    assert codes[2] == 3, "the code of the first failure is kept apart"
    assert codes[0] < 0
    assert codes[1] < 0


def test_failing_rank_leaves_its_traceback_in_the_log(jobs: Jobs) -> None:
    attempt, _ = jobs.run("print('before')\nraise RuntimeError('it broke')")

    lines = log_of(attempt)
    assert "[0] before" in lines
    assert "[0] RuntimeError: it broke" in lines


def test_killed_rank_is_restarted_within_the_budget(jobs: Jobs) -> None:
    script = """
        import os, signal, sys
        with open(sys.argv[1] + "/tries", "a") as file:
            print("try", file=file)
        if len(open(sys.argv[1] + "/tries").readlines()) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        print("third time lucky")
    """
    attempt, result = jobs.run(script, max_restarts=2)

    assert result.state is JobState.SUCCEEDED
    assert result.restarts == 2
    assert len(jobs.marks("tries")) == 3
    assert "[0] third time lucky" in log_of(attempt)


def test_restarts_are_bounded(jobs: Jobs) -> None:
    script = """
        import os, signal, sys
        with open(sys.argv[1] + "/tries", "a") as file:
            print("try", file=file)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    _, result = jobs.run(script, max_restarts=1)

    assert result.state is JobState.FAILED
    assert result.restarts == 1
    assert len(jobs.marks("tries")) == 2


def test_plain_error_of_a_script_is_not_tried_again(jobs: Jobs) -> None:
    script = """
        import sys
        with open(sys.argv[1] + "/tries", "a") as file:
            print("try", file=file)
        sys.exit(3)
    """
    _, result = jobs.run(script, max_restarts=2)

    assert result.cause is not None
    assert result.cause.exit_code == 3
    assert len(jobs.marks("tries")) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_from_outside_is_named(jobs: Jobs, rank: int) -> None:
    attempt = jobs.submit(jobs.job(TRAIN.format(act="pass"), ranks=2)).attempt
    pids = jobs.rank_pids(attempt, 2)
    wait_until(lambda: len(jobs.marks("steps")) == 2, "both ranks' first step")
    os.kill(pids[rank], signal.SIGKILL)
    result = jobs.result(attempt)

    assert result.cause is not None
    assert (result.cause.rank, result.cause.exit_code) == (rank, -9)
