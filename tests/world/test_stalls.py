"""Ranks that hang, or come late, are found within their limit and named."""

from __future__ import annotations

import pytest
from world.conftest import Jobs, log_of

from mxdist.spec import JobState

BEATING = """
    import os, signal, time
    import horovod.mxnet as hvd, mxnet as mx
    from mxdist.runtime.worker import Worker
    worker = Worker.current()
    hvd.init()
    for step in range(100_000):
        worker.beat(step)
        hvd.allreduce(mx.nd.ones(4), name="gradient").asnumpy()
        time.sleep(0.02)
        if step == 100 and hvd.rank() == 1:
            {act}
"""
SILENT = BEATING.replace("worker.beat(step)", "pass")


BOTH = pytest.mark.parametrize(
    "script", [pytest.param(BEATING, id="with beats"), pytest.param(SILENT, id="unchanged script")]
)


@BOTH
def test_stopped_rank_is_named(jobs: Jobs, script: str) -> None:
    act = "os.kill(os.getpid(), signal.SIGSTOP)"
    attempt, result = jobs.run(script.format(act=act), ranks=2, stall_timeout_s=6)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert (result.cause.kind, result.cause.rank) == ("stall", 1)
    assert any("Current thread" in line or "most recent call first" in line for line in log_of(attempt)), "stacks"


@BOTH
def test_rank_busy_elsewhere_is_named_by_horovods_own_check(jobs: Jobs, script: str) -> None:
    _, result = jobs.run(script.format(act="time.sleep(100_000)"), ranks=2, stall_timeout_s=6)

    assert result.cause is not None
    assert (result.cause.kind, result.cause.rank) == ("stall", 1)


def test_rank_without_horovod_that_stops_beating_is_named(jobs: Jobs) -> None:
    script = """
        import time
        from mxdist.runtime.worker import Worker
        worker = Worker.current()
        for step in range(100_000):
            if worker.rank == 1 and step > 10:
                time.sleep(100_000)
            worker.beat(step)
            time.sleep(0.1)
    """
    attempt, result = jobs.run(script, ranks=2, stall_timeout_s=5)

    assert result.cause is not None
    assert (result.cause.kind, result.cause.rank) == ("stall", 1)
    assert 'job.py", line 7' in "\n".join(log_of(attempt)), "the stack tells where it hung"


def test_stall_is_restarted_within_the_budget(jobs: Jobs) -> None:
    script = """
        import os, sys, time
        from mxdist.runtime.worker import Worker
        worker = Worker.current()
        worker.beat(1)
        if os.path.exists(sys.argv[1] + "/once"):
            sys.exit(0)
        open(sys.argv[1] + "/once", "w").close()
        time.sleep(100_000)
    """
    _, result = jobs.run(script, stall_timeout_s=3, max_restarts=1)

    assert (result.state, result.restarts) == (JobState.SUCCEEDED, 1)


def test_rank_that_never_joins_is_named(jobs: Jobs) -> None:
    script = """
        import os, time
        import horovod.mxnet as hvd
        if os.environ["HOROVOD_RANK"] == "1":
            time.sleep(100_000)
        hvd.init()
    """
    _, result = jobs.run(script, ranks=2, start_timeout_s=6)

    assert result.cause is not None
    assert (result.cause.kind, result.cause.rank) == ("start_timeout", 1)


def test_slow_rank_is_waited_for_longer_than_horovods_default(jobs: Jobs) -> None:
    """Horovod waits for 30 s unless told otherwise."""
    script = """
        import os, time
        import horovod.mxnet as hvd
        if os.environ["HOROVOD_RANK"] == "1":
            time.sleep(36)
        hvd.init()
        print("all", hvd.size())
    """
    attempt, result = jobs.run(script, ranks=2, start_timeout_s=600)

    assert result.state is JobState.SUCCEEDED
    assert {"[0] all 2", "[1] all 2"} <= set(log_of(attempt))


def test_script_without_horovod_is_not_hurried(jobs: Jobs) -> None:
    _, result = jobs.run("import time\ntime.sleep(4)", ranks=2, start_timeout_s=1, stall_timeout_s=1)

    assert result.state is JobState.SUCCEEDED
