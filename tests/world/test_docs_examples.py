"""The examples that people copy first, run as they stand in README and docs: real jobs on two ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from world.conftest import GENEROUS_S, Jobs, log_of, wait_until

import mxdist
from mxdist.data.stage import stage
from mxdist.spec import JobState, Split, TrainingJob, parse_job
from support.pages import REPOSITORY, example, examples
from support.terminal import Terminal


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    """A terminal in an empty folder."""
    return Terminal(tmp_path)


def test_first_job(terminal: Terminal) -> None:
    (terminal.folder / "job.yaml").write_text(example("first-job"))
    shutil.copy(REPOSITORY / "dags/scripts/train_blobs.py", terminal.folder / "train.py")

    assert "2 ranks" in terminal.mxdist("plan", "job.yaml")
    assert not (terminal.folder / "runs").exists()
    printed = terminal.mxdist("run", "job.yaml")
    for rank in (0, 1):
        assert f"[{rank}] epoch 2: " in printed
    assert terminal.only_result().state is JobState.SUCCEEDED
    assert "SUCCEEDED" in terminal.mxdist("status", "job.yaml")


def test_worker_runs_under_the_command_line(terminal: Terminal) -> None:
    (terminal.folder / "train.py").write_text(example("worker"))
    job = {"name": "worker", "script": {"path": "train.py", "args": ["120"]}, "parallelism": {"world_size": 2}}
    (terminal.folder / "job.yaml").write_text(yaml.safe_dump(job))

    terminal.mxdist("run", "job.yaml")
    result = terminal.only_result()
    assert result.steps == 120
    assert result.metrics["loss"] < 0.01  # the line is found: x is normal, the noise is zero


def test_worker_stops_with_a_checkpoint_and_goes_on(jobs: Jobs) -> None:
    job = jobs.job(example("worker"), ranks=2, grace_s=60)
    assert job.script is not None
    endless = job.script.model_copy(update={"args": (str(10**9),)})
    job = job.model_copy(update={"script": endless})
    first = jobs.submit(job).attempt
    wait_until(lambda: first.read_state().step > 60, "some steps")
    os.kill(jobs.supervisor(first), 15)
    assert jobs.result(first).state is JobState.PREEMPTED

    second = jobs.submit(job).attempt
    wait_until(lambda: any("going on from step" in line for line in log_of(second)), "the second attempt")
    wait_until(lambda: second.read_state().step > 0, "its first step")
    jobs.client.cancel(second, by="user", reason="test")
    assert second.claim.origin == first.number
    (said,) = {line.partition("step ")[2] for line in log_of(second) if "going on from step" in line}
    assert int(said) >= 60


def test_worker_by_hand_is_a_world_of_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(example("worker"))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(mxdist.__file__).parents[1])}
    subprocess.run([sys.executable, str(script), "3"], env=environment, cwd=tmp_path, check=True, timeout=GENEROUS_S)
    assert list(tmp_path.iterdir()) == [script]


def test_recipe_trains_on_two_ranks(jobs: Jobs, tmp_path: Path) -> None:
    (recipe,) = [one.text for one in examples("python") if "def network(params)" in one.text]
    path = tmp_path / "recipe.py"
    path.write_text(recipe)
    numbers = np.random.RandomState(0)
    labels = numbers.randint(0, 2, 40)
    source = tmp_path / "source"
    source.mkdir()
    np.save(source / "x.npy", (labels[:, None] * 200 + numbers.randint(0, 50, (40, 6))).astype(np.uint8))
    np.save(source / "y.npy", labels)
    staged = stage(source, str(tmp_path / "data"), "blobs", split=Split(train=0.6, validation=0.2, test=0.2))
    job = parse_job(
        {
            "name": "recipe",
            "model": {"recipe": str(path)},
            "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]},
            "parallelism": {"world_size": 2},
            "batch_size": 8,
            "epochs": 2,
        }
    )
    assert isinstance(job, TrainingJob)
    attempt = jobs.submit(job).attempt
    result = jobs.result(attempt)
    assert result.state is JobState.SUCCEEDED, log_of(attempt)
    assert {"train_loss", "validation_accuracy", "validation_loss"} <= result.metrics.keys()
