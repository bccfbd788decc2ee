"""Whole or not there at all."""

from __future__ import annotations

import errno
import io
import os
import pickle
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from mxdist.errors import CheckpointError, Fenced, StoreError
from mxdist.runtime.checkpoint import Checkpoints, pack, save_state, unpack
from mxdist.spec import TrainingJob
from mxdist.store import Attempt, JobRun, open_store
from mxdist.store.sequence import numbered
from support.share import sicken

OFFSETS = 20


def job(**fields: Any) -> TrainingJob:
    """Return a job that is never run."""
    dataset = {"manifest_uri": "/nowhere/manifests/0.json", "version": "0" * 64}
    return TrainingJob.parse({"name": "saved", "model": {"name": "mlp"}, "dataset": dataset, **fields})


def claim(root: Path, *, after: int = 0, origin: int | None = None, **fields: Any) -> Attempt:
    """Claim an attempt."""
    return JobRun(open_store(str(root)), "saved").claim(job(**fields), after=after, origin=origin)


def arrays(step: int) -> dict[str, np.ndarray]:
    """Return what a checkpoint of ``step`` holds."""
    return {"param/features.0.weight": np.full((3, 2), step, dtype=np.float64), "state/x/0": np.arange(step)}


def save(attempt: Attempt, *steps: int, keep: int = 10) -> Checkpoints:
    """Publish a checkpoint for each step."""
    checkpoints = Checkpoints(attempt, keep=keep)
    for step in steps:
        assert checkpoints.save(arrays(step), {"position": {"step": step}}, step=step)
    return checkpoints


def files_of(attempt: Attempt, step: int) -> dict[str, str]:
    """Return the keys of a checkpoint's documents, by what they are."""
    folder = attempt.store.read_json(numbered("checkpoints/index", step))["folder"]
    index = numbered("checkpoints/index", step)
    return {"arrays": f"{folder}/arrays.npz", "state": f"{folder}/state.json", "index": index}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    found = save(claim(tmp_path), 3, 7).newest()
    assert found is not None
    assert (found.step, found.attempt, found.values) == (7, 1, {"position": {"step": 7}})
    assert found.arrays.keys() == arrays(7).keys()
    for name, array in arrays(7).items():
        assert found.arrays[name].dtype == array.dtype
        assert (found.arrays[name] == array).all()


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert Checkpoints(claim(tmp_path)).newest() is None


@pytest.mark.parametrize("part", ["arrays", "state", "index"])
@pytest.mark.parametrize("offset", range(OFFSETS))
def test_a_checkpoint_cut_off_anywhere_is_passed_over(tmp_path: Path, part: str, offset: int) -> None:
    attempt = claim(tmp_path)
    checkpoints = save(attempt, 3, 7)
    key = files_of(attempt, 7)[part]
    data = attempt.store.read(key)
    attempt.store.write(key, data[: len(data) * offset // OFFSETS])
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 3


@pytest.mark.parametrize("after", ["arrays", "state"])
def test_a_save_that_was_killed_before_its_index_does_not_exist(tmp_path: Path, after: str) -> None:
    attempt = claim(tmp_path)
    checkpoints = save(attempt, 3, 7)
    files = files_of(attempt, 7)
    attempt.store.delete([files["index"], *([files["state"]] if after == "arrays" else [])])
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 3


@pytest.mark.parametrize("part", ["arrays", "state"])
def test_flipped_bytes_and_lost_files_are_passed_over(tmp_path: Path, part: str) -> None:
    attempt = claim(tmp_path)
    checkpoints = save(attempt, 1, 2, 3)
    key = files_of(attempt, 3)[part]
    data = bytearray(attempt.store.read(key))
    data[len(data) // 2] ^= 1
    attempt.store.write(key, bytes(data))
    attempt.store.delete([files_of(attempt, 2)[part]])
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 1


def test_newest_of_all_attempts_of_this_training(tmp_path: Path) -> None:
    first = claim(tmp_path)
    save(first, 5, 9)
    second = claim(tmp_path, after=1, origin=1)
    save(second, 7)
    third = claim(tmp_path, after=2, origin=1)
    found = Checkpoints(third).newest()
    assert found is not None
    assert (found.step, found.attempt) == (9, 1)


def test_a_training_from_scratch_sees_nothing_of_earlier_ones(tmp_path: Path) -> None:
    save(claim(tmp_path), 5)
    assert Checkpoints(claim(tmp_path, after=1)).newest() is None


def test_the_checkpoint_of_another_training_is_passed_over(tmp_path: Path) -> None:
    save(claim(tmp_path, seed=1), 5)
    assert Checkpoints(claim(tmp_path, after=1, origin=1, seed=2)).newest() is None


def test_another_world_size_is_the_same_training(tmp_path: Path) -> None:
    save(claim(tmp_path), 5)
    again = claim(tmp_path, after=1, origin=1, parallelism={"world_size": 4})
    assert Checkpoints(again).newest() is not None


def test_only_the_last_few_stay_and_only_ours_go(tmp_path: Path) -> None:
    first = claim(tmp_path)
    save(first, 1, 2)
    second = claim(tmp_path, after=1, origin=1)
    second.store.write("checkpoints/0000000003-orphan/arrays.npz", b"never published")
    second.store.write("checkpoints/notes.txt", b"not ours")
    save(second, 4, 5, 6, keep=2)
    keys = [entry.key for entry in second.store.list("checkpoints/")]
    assert [key for key in keys if "/index/" in key] == [numbered("checkpoints/index", step) for step in (5, 6)]
    assert {key.split("/")[1][:10] for key in keys if key.endswith((".npz", "state.json"))} == {
        "0000000005",
        "0000000006",
    }
    assert "checkpoints/notes.txt" in keys
    assert len([entry for entry in first.store.list("checkpoints/index/")]) == 2


def test_a_step_is_published_once(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    checkpoints = save(attempt, 4)
    assert not checkpoints.save(arrays(9), {}, step=4)
    found = checkpoints.newest()
    assert found is not None
    assert (found.arrays["param/features.0.weight"] == 4).all()
    assert len([entry for entry in attempt.store.list("checkpoints/") if entry.key.endswith(".npz")]) == 1


def test_an_old_attempt_publishes_nothing_more(tmp_path: Path) -> None:
    first = claim(tmp_path)
    checkpoints = save(first, 1)
    claim(tmp_path, after=1, origin=1)
    with pytest.raises(Fenced):
        checkpoints.save(arrays(2), {}, step=2)
    assert not first.store.exists(numbered("checkpoints/index", 2))


@pytest.mark.parametrize("broken", ["list", "open"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_store_that_cannot_be_read_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, code: int
) -> None:
    attempt = claim(tmp_path)
    checkpoints = save(attempt, 1)
    sicken(monkeypatch, Path(attempt.store.uri), broken, code=code)
    with pytest.raises(StoreError, match=os.strerror(code)):
        checkpoints.newest()


def test_a_store_that_is_gone_is_not_an_empty_one(tmp_path: Path) -> None:
    """Where a share was unmounted is an empty folder."""
    runs = tmp_path / "runs"
    attempt = claim(runs)
    checkpoints = save(attempt, 1)
    runs.rename(tmp_path / "share")
    runs.mkdir()
    with pytest.raises(StoreError):
        checkpoints.newest()


@pytest.mark.parametrize("folder", ["../../etc", "checkpoints/../../x", "/etc", 7])
def test_an_index_that_leads_elsewhere_is_passed_over(tmp_path: Path, folder: Any) -> None:
    attempt = claim(tmp_path)
    checkpoints = save(attempt, 1, 2)
    index = attempt.store.read_json(numbered("checkpoints/index", 2))
    attempt.store.write_json(numbered("checkpoints/index", 2), {**index, "folder": folder})
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 1


class Exploit:
    """What a malicious pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/mxdist-pickle-was-run"),))


def test_pickle_is_neither_written_nor_read() -> None:
    objects = np.array([Exploit()], dtype=object)
    with pytest.raises(CheckpointError, match="Python objects"):
        pack({"weight": objects})
    poisoned = io.BytesIO()
    np.savez(poisoned, weight=objects)
    for data in (poisoned.getvalue(), pickle.dumps(Exploit())):
        with pytest.raises(CheckpointError, match="no arrays that can be read"):
            unpack(data, "here")
    assert not Path("/tmp/mxdist-pickle-was-run").exists()


def test_equal_arrays_are_equal_bytes_and_numpy_reads_them() -> None:
    data = pack({"b": np.ones(2), "a": np.zeros((2, 2), dtype=np.float32)})
    assert data == pack({"a": np.zeros((2, 2), dtype=np.float32), "b": np.ones(2)})
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        assert sorted(archive.files) == ["a", "b"]
        assert archive["a"].dtype == np.float32


def test_a_scripts_state_may_mix_arrays_and_values(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    assert save_state(attempt, {"weight": mx.nd.ones((2,)), "mean": np.zeros(1), "epoch": 3, "note": "x"}, step=2)
    found = Checkpoints(attempt).newest()
    assert found is not None
    assert found.state["weight"].tolist() == [1, 1]
    assert (found.state["epoch"], found.state["note"], found.state["mean"].tolist()) == (3, "x", [0.0])
    with pytest.raises(CheckpointError, match="arrays and JSON values only"):
        save_state(attempt, {"net": object()}, step=3)
