"""Workers, servers and a scheduler are one world: whoever dies is named, the rest ends, and training goes on."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world.conftest import Jobs, log_of, wait_until
from world.toy import job_on

from mxdist import processes
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt

pytestmark = pytest.mark.layouts

SERVERS = {"strategy": "parameter_server", "world_size": 2, "servers": 2}
UNCHANGED = """
    import mxnet as mx
    store = mx.kv.create("dist_sync")
    store.init("weight", mx.nd.zeros(4))
    store.push("weight", mx.nd.ones(4) * (store.rank + 1))
    summed = mx.nd.zeros(4)
    store.pull("weight", out=summed)
    print("sum", summed.asnumpy().tolist(), "of", store.num_workers)
"""
BROKEN = """
    import mxnet as mx
    class Broken(mx.optimizer.Optimizer):
        pass
    store = mx.kv.create("dist_async")
    store.init(0, mx.nd.zeros(4))
    store.set_optimizer(Broken())
    weight = mx.nd.zeros(4)
    for _ in range(100_000):
        store.push(0, mx.nd.ones(4))
        store.pull(0, out=weight)
        weight.wait_to_read()
"""
IDLE = "import time\ntime.sleep(100_000)"


def with_servers(job: TrainingJob, **changes: Any) -> TrainingJob:
    """Return a script's job with parameter servers."""
    document = job.to_document()
    found = TrainingJob.parse({**document, "parallelism": {**SERVERS, **changes}})
    assert isinstance(found, TrainingJob)
    return found


def helpers(attempt: Attempt, role: str) -> list[tuple[int, dict[str, str]]]:
    """Return the process ids and the environments of the living processes of a role."""
    found = []
    for process in processes.find(attempt.claim.token):
        try:
            lines = Path(f"/proc/{process.pid}/environ").read_bytes().decode().split("\0")
        except OSError:
            continue
        environment = dict(line.split("=", 1) for line in lines if "=" in line)
        if environment.get("DMLC_ROLE") == role:
            found.append((process.pid, environment))
    return found


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def weights(attempt: Attempt) -> dict[str, np.ndarray]:
    """Return the published parameters."""
    (path,) = Path(f"{attempt.store.uri}/model").rglob("params.npz")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def test_whoever_is_killed_the_training_ends_with_the_weights_of_an_undisturbed_one(
    jobs: Jobs,
    dataset: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barriers = jobs.folder / "barriers"
    barriers.mkdir()
    monkeypatch.setenv("MXDIST_BARRIERS", str(barriers))
    job = job_on(dataset, epochs=4, parallelism=SERVERS, limits={"grace_s": 60, "max_restarts": 3})
    for epoch in (1, 2, 3):
        (barriers / f"disturbed.epoch-{epoch}-rank-0.hold").touch()
    attempt = jobs.submit(job, "disturbed").attempt
    for epoch, role in ((1, "worker"), (2, "server"), (3, "scheduler")):
        place = barriers / f"disturbed.epoch-{epoch}-rank-0"
        wait_until(place.with_name(f"{place.name}.reached").exists, f"epoch {epoch}")
        pid = jobs.rank_pids(attempt, 2)[1] if role == "worker" else helpers(attempt, role)[-1][0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda world=epoch + 1: attempt.read_state().world == world, "the next world")
        place.with_name(f"{place.name}.hold").unlink()
    result = jobs.result(attempt)

    assert (result.state, result.restarts) == (JobState.SUCCEEDED, 3), result.cause
    told = "\n".join(log_of(attempt))
    for name in ("rank 1", r"server \d", "scheduler"):
        assert re.search(rf"{name} was killed by SIGKILL .*; starting again from the last checkpoint", told), told
    undisturbed = jobs.submit(job, "undisturbed").attempt
    assert jobs.result(undisturbed).state is JobState.SUCCEEDED
    expected = weights(undisturbed)
    assert all((array == expected[name]).all() for name, array in weights(attempt).items())


@pytest.mark.parametrize(
    ("role", "name", "rank"),
    [("worker", "rank [01]", True), ("server", "server [01]", False), ("scheduler", "scheduler", False)],
)
def test_killed_process_is_named_and_nothing_is_left(jobs: Jobs, role: str, name: str, rank: bool) -> None:
    attempt = jobs.submit(with_servers(jobs.job(IDLE))).attempt
    pid, environment = wait_until(
        lambda: len(helpers(attempt, role)) == (1 if role == "scheduler" else 2) and helpers(attempt, role)[0], role
    )
    port = int(environment["DMLC_PS_ROOT_PORT"])
    wait_until(lambda: listens(port), "the scheduler")
    os.kill(pid, signal.SIGKILL)
    result = jobs.result(attempt)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert re.fullmatch(rf"{name} was killed by SIGKILL.*", result.cause.message)
    assert (result.cause.kind, result.cause.exit_code, result.cause.rank is not None) == ("rank_exit", -9, rank)
    assert not listens(port)


def test_stopped_server_is_named(jobs: Jobs) -> None:
    attempt = jobs.submit(with_servers(jobs.job(IDLE, stall_timeout_s=2), servers=1)).attempt
    pid, _ = wait_until(lambda: helpers(attempt, "server"), "the server")[0]
    os.kill(pid, signal.SIGSTOP)
    result = jobs.result(attempt)

    assert result.cause is not None
    assert (result.cause.kind, result.cause.message) == ("stall", "server 0 has been stopped by a signal for 2 s")


def test_servers_die_with_their_supervisor(jobs: Jobs) -> None:
    attempt = jobs.submit(with_servers(jobs.job(IDLE))).attempt
    wait_until(lambda: len(helpers(attempt, "server")) == 2 and helpers(attempt, "scheduler"), "servers")
    os.kill(jobs.supervisor(attempt), signal.SIGKILL)
    wait_until(lambda: not processes.find(attempt.claim.token), "the end of all")


def test_script_with_a_key_value_store_runs_unchanged(jobs: Jobs) -> None:
    attempt = jobs.submit(with_servers(jobs.job(UNCHANGED))).attempt
    result = jobs.result(attempt)

    assert result.state is JobState.SUCCEEDED, result.cause
    lines = log_of(attempt)
    for rank in range(2):
        assert f"[{rank}] sum [3.0, 3.0, 3.0, 3.0] of 2" in lines


def test_optimizer_that_servers_cannot_use_ends_the_job(jobs: Jobs) -> None:
    attempt = jobs.submit(with_servers(jobs.job(BROKEN, max_restarts=2))).attempt
    result = jobs.result(attempt)

    assert (result.state, result.restarts) == (JobState.FAILED, 0), "nothing is tried twice"
    assert result.cause is not None
    assert re.match(r"server [01] failed: AttributeError: .*Broken", result.cause.message)
    assert any(re.match(r"\[server [01]\] AttributeError: .*Broken", line) for line in log_of(attempt))
