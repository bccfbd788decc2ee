"""A world over two hosts: the attempt's folder looks as if every rank were local, and whoever is lost is named."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from world.conftest import Jobs, log_of, wait_until
from world.hosts import CLUSTER, FIRST, SECOND, across, agent, disk, on_hosts

import mxdist
from mxdist import processes
from mxdist.spec import JobState

CANARY = "canary-81d2"

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


SHOW = """
    import json, os, sys, time
    rank = os.environ["HOROVOD_RANK"]
    with open(sys.argv[1] + f"/environment-{rank}", "w") as file:
        json.dump(dict(os.environ), file)
    print("shown", flush=True)
    time.sleep(100_000)
"""
TALK = """
    import os, sys
    for number in range(20_000):
        print(os.environ["HOROVOD_RANK"], "says", number)
    sys.stdout.write("the end without a line's end")
"""


def test_secrets_reach_ranks_everywhere_and_nothing_else(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", CANARY)
    on_hosts(jobs).more_secrets = {"MXDIST_SSH_KEY": f"{CANARY}-key"}
    secrets = {"AWS_SECRET_ACCESS_KEY": CANARY, "NOT_ALLOWED": CANARY}
    attempt = jobs.submit(across(jobs.job(SHOW, ranks=2)), secrets=secrets).attempt
    wait_until(lambda: sum(line.endswith("shown") for line in log_of(attempt)) == 2, "both ranks")
    found = [process.pid for process in processes.find(attempt.claim.token)]
    commands = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in found)
    agents = Path(f"/proc/{agent(attempt)}/environ").read_text()
    kept = [path for root in ("runs", "jobs", f"disk-{SECOND}") for path in (jobs.folder / root).rglob("*")]
    spilt = [path for path in kept if path.is_file() and CANARY.encode() in path.read_bytes()]
    jobs.client.cancel(attempt, by="user", reason="test")

    assert len(found) == 4, "a supervisor, an agent and two ranks"
    assert CANARY not in commands + agents
    assert spilt == []
    for rank in range(2):
        environment = json.loads((jobs.folder / f"environment-{rank}").read_text())
        assert [name for name, value in environment.items() if CANARY in value] == ["AWS_SECRET_ACCESS_KEY"]


def test_logs_of_other_hosts_are_complete_and_in_order(jobs: Jobs) -> None:
    on_hosts(jobs)
    attempt = jobs.submit(across(jobs.job(TALK, ranks=2))).attempt
    assert jobs.result(attempt).state is JobState.SUCCEEDED

    expected = [*(f"{{}} says {number}" for number in range(20_000)), "the end without a line's end"]
    for rank in range(2):
        text = (jobs.attempt_dir(attempt) / "world-1" / f"rank-{rank}.log").read_text()
        assert text == "\n".join(expected).format(*[rank] * 20_000)
        assert f"[{rank}] the end without a line's end" in log_of(attempt)


def test_node_side_elsewhere_runs_from_the_bundle(jobs: Jobs) -> None:
    script = """
        import mxdist, helper, os
        print("package", mxdist.__file__)
        print("helper", helper.VALUE)
        print("folder", os.getcwd())
    """
    (jobs.folder / "scripts").mkdir()
    (jobs.folder / "scripts" / "helper.py").write_text("VALUE = 42")
    on_hosts(jobs)
    job = jobs.job(script, ranks=2)
    attempt = jobs.submit(across(job)).attempt
    assert jobs.result(attempt).state is JobState.SUCCEEDED, log_of(attempt)

    (code,) = [path for path in (disk(jobs) / "code").iterdir() if path.is_dir()]
    lines = log_of(attempt)
    folder = disk(jobs) / "job" / "0000000001@1" / "code"
    assert f"[1] package {folder}/mxdist/__init__.py" in lines
    assert "[1] helper 42" in lines
    assert (code / "user" / "helper.py").read_text() == "VALUE = 42"


def test_no_rank_anywhere_dumps_its_memory(jobs: Jobs) -> None:
    on_hosts(jobs)
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    script = "import resource; print('core', resource.getrlimit(resource.RLIMIT_CORE)[0])"
    attempt = jobs.submit(across(jobs.job(script, ranks=2))).attempt
    assert jobs.result(attempt).state is JobState.SUCCEEDED, log_of(attempt)

    assert {"[0] core 0", "[1] core 0"} <= set(log_of(attempt))


def test_agent_needs_nothing_that_is_slow_to_import() -> None:
    slow = ("mxnet", "horovod", "numpy", "pydantic", "boto3", "mlflow", "asyncssh")
    code = f"import sys, mxdist.runtime.agent; print(sorted(set({slow!r}) & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(mxdist.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_hosts_that_cannot_reach_each_other_are_drawn(jobs: Jobs) -> None:
    on_hosts(jobs)
    cluster = {**CLUSTER, "interface": "203.0.113.0/24"}
    result = jobs.result(jobs.submit(across(jobs.job("pass", ranks=2), cluster=cluster)).attempt)

    assert result.cause is not None
    assert result.restarts == 0
    assert f"{FIRST} has no address at 203.0.113.0/24: 127.0.0.1 (lo)" in result.cause.message
