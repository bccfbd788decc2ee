"""A training that was interrupted ends with the weights of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.worlds import Jobs, images, jobs

from mxdist.runtime.checkpoint import Checkpoints
from mxdist.spec import TrainingJob
from mxdist.store import Attempt
from mxdist.store.sequence import numbered

DROPOUT = """
from mxnet.gluon import nn

def network(params):
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu"), nn.Dropout(0.5), nn.Dense(params["classes"]))
    return net
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """73 examples, so 10 steps an epoch at batch 8, the last with one row."""
    return jobs(tmp_path_factory.mktemp("resume"), {"train": images(73), "validation": images(9, seed=1)})


def train(small: Jobs, key: str, **fields: Any) -> Attempt:
    """Train to the end, publishing every checkpoint; return the attempt."""
    attempt = small.claim(small.job(**fields), key)
    world = small.start(attempt, mutation="patient")
    assert set(world.wait()) == {0}, world.logs()
    return attempt


def forget_after(attempt: Attempt, step: int) -> None:
    """Make it as if the training had been killed after ``step``: later checkpoints were never published."""
    later = [entry.key for entry in attempt.store.list("checkpoints/index/") if int(entry.key[-15:-5]) > step]
    assert later
    attempt.store.delete(later)


def resume(small: Jobs, first: Attempt, **fields: Any) -> Attempt:
    """Go on with the training of ``first`` in a new attempt."""
    second = small.claim(small.job(**fields), first.claim.job_key, after=first.number, origin=first.claim.origin)
    world = small.start(second)
    assert set(world.wait()) == {0}, world.logs()
    return second


def worst(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Return the largest difference."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize(("before", "after", "bound"), [(2, 2, 0.0), (2, 1, 1e-12), (1, 2, 1e-12)])
@pytest.mark.parametrize("optimizer", [{"name": "sgd"}, {"name": "adam", "learning_rate": 0.01}], ids=["sgd", "adam"])
def test_resume_in_the_middle_of_an_epoch(
    small: Jobs, optimizer: dict[str, Any], before: int, after: int, bound: float
) -> None:
    fields = {
        "checkpoints": {"every_steps": 3, "keep": 100},
        "optimizer": {**optimizer, "schedule": {"decay": "cosine", "warmup_steps": 4}},
    }
    key = f"{optimizer['name']}-{before}-{after}"
    first = train(small, key, **fields, parallelism={"world_size": before})
    forget_after(first, 15)
    second = resume(small, first, **fields, parallelism={"world_size": after})
    assert worst(small.exported(first), small.exported(second)) <= bound
    whole = {(record.key, record.step): record.value for record in small.journal(first)}
    again = [record for record in small.journal(second) if record.key in ("loss", "train_loss", "validation_loss")]
    assert [record.step for record in again if record.key == "loss"] == [16, 17, 18, 19, 20]
    assert {record.key for record in again} == {"loss", "train_loss", "validation_loss"}
    assert all(abs(whole[record.key, record.step] - record.value) <= max(bound, 1e-15) for record in again)


def test_resume_with_dropout_is_exact(small: Jobs, tmp_path: Path) -> None:
    (tmp_path / "dropout.py").write_text(DROPOUT)
    fields = {
        "model": {"recipe": str(tmp_path / "dropout.py")},
        "dtype": "float32",
        "checkpoints": {"every_steps": 3, "keep": 100},
        "parallelism": {"world_size": 2, "lossy": ["dropout"]},
    }
    first = train(small, "dropout", **fields)
    forget_after(first, 6)
    assert worst(small.exported(first), small.exported(resume(small, first, **fields))) == 0.0


def test_stop_writes_a_checkpoint_and_goes_on_from_it(small: Jobs) -> None:
    fields = {"parallelism": {"world_size": 2}, "optimizer": {"name": "adam", "learning_rate": 0.01}}
    whole = train(small, "whole", **fields)
    stopped = small.claim(small.job(**fields), "stopped")
    world = small.start(stopped, stop=True)
    assert world.wait() == [82, 82], world.logs()
    saved = Checkpoints(stopped).newest()
    assert saved is not None
    assert world.result()["state"] == "stopped"
    assert saved.step == world.result()["steps"] < 20
    resumed = resume(small, stopped, **fields)
    assert worst(small.exported(whole), small.exported(resumed)) == 0.0


def test_restarted_world_of_the_same_attempt(small: Jobs) -> None:
    fields = {"parallelism": {"world_size": 2}, "checkpoints": {"every_steps": 4, "keep": 100}}
    attempt = train(small, "restart", **fields)
    before = small.exported(attempt)
    forget_after(attempt, 8)
    world = small.start(attempt, world=2)
    assert world.wait() == [0, 0], world.logs()
    assert worst(before, small.exported(attempt)) == 0.0
    assert [record.step for record in small.journal(attempt) if record.key == "loss" and record.session == 2] == list(
        range(9, 21)
    )


SCRIPT = """
import sys
import numpy as np
import horovod.mxnet as hvd
from mxdist.runtime.worker import Worker

hvd.init()
worker = Worker.current()
saved = worker.restore()
weight, first = (saved.state["weight"], saved.step) if saved else (np.zeros(2), 0)
for step in range(first + 1, 11):
    weight = weight + step
    worker.beat(step)
    worker.log_metrics({"weight": weight[0]}, step=step)
    if worker.agree(step == 4 and first == 0 and worker.rank == 1):
        worker.checkpoint({"weight": weight}, step=step)
        worker.stop()
worker.log_metrics({"final": weight[0], "began": first}, step=10)
hvd.shutdown()
"""


def test_a_script_that_asks_the_worker_resumes(small: Jobs, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    job = TrainingJob.parse(
        {"name": "script", "script": {"path": str(tmp_path / "script.py")}, "parallelism": {"world_size": 2}}
    )
    attempt = small.claim(job, "script")
    first = small.start(attempt)
    assert first.wait() == [82, 82], first.log()
    second = small.start(attempt, world=2)
    assert second.wait() == [0, 0], second.log()
    last = {record.key: record.value for record in small.journal(attempt)}
    assert (last["began"], last["final"]) == (4.0, 55.0)


def test_finished_training_goes_straight_to_its_end(small: Jobs) -> None:
    first = train(small, "finished", parallelism={"world_size": 2})
    second = resume(small, first, parallelism={"world_size": 2})
    assert worst(small.exported(first), small.exported(second)) == 0.0
    assert not [record for record in small.journal(second) if record.key == "loss"]


def test_torn_checkpoint_is_passed_over(small: Jobs) -> None:
    fields = {"checkpoints": {"every_steps": 5, "keep": 100}, "parallelism": {"world_size": 2}}
    first = train(small, "torn", **fields)
    forget_after(first, 10)
    index = first.store.read_json(numbered("checkpoints/index", 10))
    arrays = first.store.read(f"{index['folder']}/arrays.npz")
    first.store.write(f"{index['folder']}/arrays.npz", arrays[: len(arrays) // 2])
    second = resume(small, first, **fields)
    assert min(record.step for record in small.journal(second) if record.key == "loss") == 6
    assert worst(small.exported(first), small.exported(second)) == 0.0
