"""A rank that ends well, and too early, is named: not the one that fails because it waited in vain."""

from __future__ import annotations

import pytest
from world.conftest import Jobs

from mxdist.spec import JobState

SCRIPT = """
    import os, sys, time
    import horovod.mxnet as hvd
    import mxnet as mx
    hvd.init()
    steps = 3 if hvd.rank() == 1 else 100_000
    for step in range(steps):
        hvd.allreduce(mx.nd.ones((8,)), name=f"step{{step}}").wait_to_read()
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "hvd.shutdown()", "os._exit(0)"], ids=["return", "shutdown", "_exit"])
def test_rank_that_ends_early_is_named(jobs: Jobs, end: str) -> None:
    _, result = jobs.run(SCRIPT.format(end=end), ranks=2, stall_timeout_s=60)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert result.cause.rank == 1, result.cause
    assert "rank 1 ended with code 0" in result.cause.message
    assert "rank 0" in result.cause.message
