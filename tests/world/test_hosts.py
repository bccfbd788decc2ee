"""A world over two hosts: the attempt's folder looks as if every rank were local, and whoever is lost is named."""

from __future__ import annotations

from world.conftest import Jobs, log_of
from world.hosts import FIRST, SECOND, across, disk, on_hosts

from mxdist.spec import JobState

SUM = """
    import os
    import horovod.mxnet as hvd, mxnet as mx
    hvd.init()
    total = hvd.allreduce(mx.nd.array([hvd.rank() + 1.0]), op=hvd.Sum, name="total").asscalar()
    print("sum", total, "rank", hvd.rank(), "of", hvd.size(), "local", hvd.local_rank(), "of", hvd.local_size(),
          "cross", hvd.cross_rank(), "of", hvd.cross_size(), "at", os.environ["HOROVOD_HOSTNAME"], flush=True)
    hvd.shutdown()
"""


def test_ranks_of_two_hosts_reduce_together(jobs: Jobs) -> None:
    on_hosts(jobs)
    attempt = jobs.submit(across(jobs.job(SUM, ranks=2))).attempt
    result = jobs.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    lines = log_of(attempt)
    for rank, host in enumerate((FIRST, SECOND)):
        assert f"[{rank}] sum 3.0 rank {rank} of 2 local 0 of 1 cross {rank} of 2 at {host}" in lines
    assert [rank["host"] for rank in attempt.read_state().ranks] == [FIRST, SECOND]
    assert not list(disk(jobs).glob("job/*@*")), "an agent leaves nothing but code and datasets behind"
