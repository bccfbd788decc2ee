"""What goes wrong on one rank ends all of them, with the reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from parallel.worlds import PLUGINS, Jobs, images, jobs, poll

from mxdist.runtime.checkpoint import Checkpoints

BATCH_NORM = """
from mxnet.gluon import nn

def network(params):
    net = nn.HybridSequential()
    net.add(nn.Dense(8), nn.BatchNorm(), nn.Dense(params["classes"]))
    return net
"""


def test_not_a_number_on_one_rank_names_step_rank_and_layer(tmp_path: Path) -> None:
    x, y = images(80)
    x = x / 255
    x[53, 0, 0, 0] = 1e200  # without shuffling, step 7 has rows 48 to 55, and rank 1 the second half of them
    small = jobs(tmp_path, {"train": (x, y)})
    fields = {"shuffle": False, "checkpoints": {"every_steps": 2}, "parallelism": {"world_size": 2}}
    attempt = small.claim(small.job(**fields), "nan")
    world = small.start(attempt)
    assert world.wait() == [84, 84], world.logs()
    for rank in (0, 1):
        error = world.result(rank)["error"]
        assert error["kind"] == "nonfinite"
        assert not error["retryable"]
        assert "the gradient of features.0.weight is not finite at step 7 on rank 1" in error["message"]
    saved = Checkpoints(attempt).newest()
    assert saved is not None
    assert saved.step == 6
    assert all(np.isfinite(array).all() for array in saved.arrays.values())
    assert not (small.folder(attempt) / "model").exists()


def test_overflow_is_noticed(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(80)})
    fields = {"dtype": "float32", "optimizer": {"learning_rate": 1e30}, "parallelism": {"world_size": 2}}
    world = small.start(small.claim(small.job(**fields), "overflow"))
    assert world.wait() == [84, 84], world.logs()


def test_killed_rank_ends_the_other_as_one_to_try_again(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(80)})
    attempt = small.claim(small.job(epochs=100_000, parallelism={"world_size": 2}), "killed")
    world = small.start(attempt)
    poll(lambda: (world.beat(1) or {"step": 0})["step"] > 0, what="the first steps")
    os.kill(world.processes[1].pid, signal.SIGKILL)
    assert world.wait() == [83, -signal.SIGKILL], world.logs()
    assert world.result(0)["error"]["retryable"]


def test_batch_norm_on_several_ranks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "norm.py").write_text(BATCH_NORM)
    small = jobs(tmp_path, {"train": images(24)})
    job = small.job(model={"recipe": str(tmp_path / "norm.py")}, parallelism={"world_size": 2})
    world = small.start(small.claim(job, "norm"))
    assert world.wait() == [81, 81]
    assert "parallelism.batch_norm: 1: BatchNorm takes its statistics" in world.result(1)["error"]["message"]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 10])
def test_any_number_of_examples(tmp_path: Path, rows: int) -> None:
    """Ranks never disagree about the number of steps, even when one has no example at all (horovod#3980, #2506)."""
    small = jobs(tmp_path, {"train": images(rows, classes=1), "validation": images(1, classes=1)})
    small_job = {"batch_size": 3, "model": {"name": "mlp", "params": {"hidden": 4, "classes": 2}}}
    one = small.train("one", **small_job)
    three = small.train("three", **small_job, parallelism={"world_size": 3})
    assert max(float(np.abs(one[name] - three[name]).max()) for name in one) < 1e-12


PARENT = """
import json, sys, time
from pathlib import Path
from parallel.worlds import Jobs
from mxdist.store import JobRun, open_store

jobs = Jobs(Path(sys.argv[1]), json.loads(sys.argv[2]))
world = jobs.start(JobRun(open_store(sys.argv[1] + "/runs"), "orphan").attempt(1))
print(world.processes[0].pid, flush=True)
time.sleep(600)
"""


def test_rank_of_a_dead_parent_dies(tmp_path: Path) -> None:
    small: Jobs = jobs(tmp_path, {"train": images(80)})
    attempt = small.claim(small.job(epochs=100_000), "orphan")
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(PLUGINS)])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), json.dumps(small.dataset)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout as lines:
        rank = int(lines.readline())
        poll((small.folder(attempt) / "world-1" / "rank-0.beat.json").exists, what="the rank to train")
        parent.kill()
        parent.wait()
    poll(lambda: not _alive(rank), what="the rank to die with its parent")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_mpi_without_a_horovod_that_has_it_is_refused(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(16)})
    attempt = small.claim(small.job(parallelism={"world_size": 2, "controller": "mpi"}), "mpi")
    world = small.start(attempt)
    assert world.wait() == [81, 81], world.logs()
    assert "Horovod was built without MPI; rebuild it with HOROVOD_WITH_MPI=1" in world.result()["error"]["message"]
