"""What a script sees of its job, with and without one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from parallel.inprocess import worker_of
from parallel.worlds import Jobs, images, jobs, poll

from mxdist.errors import SpecError
from mxdist.runtime import worker as module
from mxdist.runtime.worker import Worker


@pytest.fixture
def small(tmp_path: Path) -> Jobs:
    """Any dataset."""
    return jobs(tmp_path, {"train": images(8)})


def test_without_a_job_it_is_a_world_of_one_that_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = Worker.from_environment({})
    worker.log_metrics({"loss": 1.0}, step=1)
    worker.beat(1)
    worker.progress(epoch=1, epochs=2, step=1, steps=2)
    worker.write_result({"state": "done"})
    assert (worker.rank, worker.world_size, worker.local_rank) == (0, 1, 0)
    assert worker.job is None
    assert worker.params == {}
    assert not worker.should_stop()
    assert worker.agree(True)
    assert not worker.checkpoint({"epoch": 1}, step=1)
    assert worker.restore() is None
    assert list(tmp_path.iterdir()) == []


def test_current_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_current", None)
    monkeypatch.setenv("HOROVOD_RANK", "3")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    worker = Worker.current()
    assert (worker.rank, worker.world_size, worker.local_rank) == (3, 4, 1)
    assert Worker.current() is worker


def test_a_rank_has_one_device() -> None:
    """Horovod reduces the gradients of a rank's first device only, and says nothing."""
    assert Worker.from_environment({}).devices == [mx.cpu()]


HYBRID = {"strategy": "hybrid", "inside": "devices", "devices": 2, "world_size": 2}


@pytest.mark.parametrize(
    ("gpus", "local_rank", "parallelism", "expected"),
    [
        (0, 0, {}, [mx.cpu(0)]),
        (4, 3, {}, [mx.gpu(3)]),
        (1, 1, {}, [mx.cpu(0)]),
        (0, 0, {"strategy": "devices", "devices": 3}, [mx.cpu(0), mx.cpu(1), mx.cpu(2)]),
        (0, 1, HYBRID, [mx.cpu(0), mx.cpu(1)]),
        (4, 1, HYBRID, [mx.gpu(2), mx.gpu(3)]),
    ],
)
def test_devices_of_a_rank(
    small: Jobs, monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int, parallelism: Any, expected: Any
) -> None:
    monkeypatch.setattr(mx.context, "num_gpus", lambda: gpus)
    worker = worker_of(small, small.claim(small.job(parallelism=parallelism), "devices"))
    worker.local_rank = local_rank
    assert worker.devices == expected


def test_devices_that_do_not_exist_are_refused(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 3)
    worker = worker_of(small, small.claim(small.job(parallelism=HYBRID), "missing"))
    worker.local_rank = worker.rank = 1
    with pytest.raises(
        SpecError, match=r"parallelism.devices: rank 1 needs gpu\(3\), but its host has GPUs 0 to 2 only"
    ):
        _ = worker.devices


def test_job_and_params(small: Jobs) -> None:
    worker = worker_of(small, small.claim(small.job(), "one"))
    assert worker.job == small.job()
    assert worker.params == {"hidden": 16}


def test_metrics_of_rank_0_are_recorded(small: Jobs) -> None:
    attempt = small.claim(small.job(), "one")
    worker = worker_of(small, attempt)
    worker.log_metrics({"loss": 0.5, "bad": float("nan")}, step=3, epoch=2)
    worker.rank = 1
    worker.log_metrics({"loss": 9.0}, step=4)
    found = [(record.key, record.value, record.step, record.epoch) for record in small.journal(attempt)]
    assert found == [("loss", 0.5, 3, 2), ("bad", None, 3, 2)]


def test_beats_are_whole_and_not_too_many(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(small, small.claim(small.job(), "one"))
    assert worker.world_dir is not None
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    steps = []
    for step, at in enumerate([100.0, 100.4, 100.6, 100.7, 101.2], start=1):
        now[0] = at
        worker.beat(step)
        steps.append(json.loads((worker.world_dir / "rank-0.beat.json").read_text())["step"])
    assert steps == [1, 1, 3, 3, 5]
    assert json.loads((worker.world_dir / "rank-0.beat.json").read_text()).keys() == {"rank", "pid", "step", "time"}


def test_a_busy_rank_beats_and_then_no_more(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(small, small.claim(small.job(), "one"))
    monkeypatch.setattr(module, "_BEAT_S", 0.0)
    monkeypatch.setattr(module, "_BUSY_BEAT_S", 0.01)
    assert worker.world_dir is not None
    path = worker.world_dir / "rank-0.beat.json"
    with worker.busy(4):
        first = path.read_bytes()
        poll(lambda: path.read_bytes() != first, what="another beat")
    assert json.loads(path.read_bytes())["step"] == 4
    assert "mxdist-busy" not in {thread.name for thread in threading.enumerate()}


def test_progress_holds_only_numbers_that_json_knows(small: Jobs) -> None:
    worker = worker_of(small, small.claim(small.job(), "one"))
    assert worker.world_dir is not None
    worker.progress(epoch=1, epochs=2, step=3, steps=8, samples_per_s=9.5, metrics={"loss": float("inf"), "ok": 1.0})
    found = json.loads((worker.world_dir / "progress.json").read_text())
    assert found.pop("time") > 0
    assert found == {"epoch": 1, "epochs": 2, "step": 3, "steps": 8, "samples_per_s": 9.5, "metrics": {"ok": 1.0}}


@pytest.mark.parametrize(("control", "stop"), [('{"stop": true}', True), ('{"stop": false}', False), ('{"sto', False)])
def test_stop_is_read_from_the_supervisor(small: Jobs, control: str, stop: bool) -> None:
    worker = worker_of(small, small.claim(small.job(), "one"))
    assert worker.world_dir is not None
    (worker.world_dir / "control.json").write_text(control)
    assert worker.should_stop() is stop


def test_stopping_is_an_exit_code() -> None:
    with pytest.raises(SystemExit) as stopped:
        Worker.from_environment({}).stop()
    assert stopped.value.code == 82


def test_a_scripts_state_comes_back_in_the_next_attempt(small: Jobs) -> None:
    first = small.claim(small.job(), "one")
    assert worker_of(small, first).checkpoint({"weight": mx.nd.ones((2,)), "mean": np.ones(3), "seen": 7}, step=5)
    second = worker_of(small, small.claim(small.job(), "one", after=1, origin=1))
    saved = second.restore()
    assert saved is not None
    assert (saved.step, saved.state["seen"], saved.state["weight"].tolist()) == (5, 7, [1.0, 1.0])


def test_only_rank_0_writes_checkpoints(small: Jobs) -> None:
    worker = worker_of(small, small.claim(small.job(), "one"))
    worker.rank = 1
    assert not worker.checkpoint({"seen": 7}, step=5)
    assert worker.restore() is None
