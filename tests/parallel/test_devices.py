"""Several devices in one process: the law, where each row is computed, and what must not go wrong silently."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from parallel.inprocess import trainer_of, worker_of
from parallel.test_law import BOUND, Law, make_law
from parallel.worlds import images, jobs

from mxdist.errors import SpecError, TrainingFailed
from mxdist.runtime import loop, update
from mxdist.runtime.batches import Batch
from mxdist.runtime.checkpoint import Checkpoints
from mxdist.runtime.parallel import Alone, devices, layout
from mxdist.spec import TrainingJob
from mxdist.store import Attempt
from mxdist.store.sequence import numbered

TWO = {"strategy": "devices", "devices": 2}


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """75 examples in batches of 8: the last one has three rows."""
    return make_law(tmp_path_factory.mktemp("devices") / "sgd", "sgd", 75)


@pytest.mark.parametrize("rows", range(8))
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_rows_are_divided_among_devices(rows: int, parts: int) -> None:
    slices = layout.divide(rows, parts)
    assert [row for one in slices for row in range(rows)[one]] == list(range(rows))
    sizes = [one.stop - one.start for one in slices]
    assert len(sizes) == min(rows, parts)
    assert all(max(sizes) - size <= 1 for size in sizes)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_devices_give_the_weights_and_losses_of_one(law: Law, count: int) -> None:
    assert law.here(parallelism={"strategy": "devices", "devices": count}) < BOUND


def test_adam_on_devices(tmp_path: Path) -> None:
    assert make_law(tmp_path / "adam", "adam", 73).here(parallelism={"strategy": "devices", "devices": 3}) < BOUND


def one_device_only(rows: int, parts: int) -> list[slice]:
    return [slice(0, rows)][: min(rows, 1)]


def contexts(trainer: Any, rows: int) -> list[list[mx.Context]]:
    """Return where one batch of ``rows`` was computed: of each replica, the devices of its inputs, weights, outputs."""
    seen: list[list[mx.Context]] = []

    def spy(replica: devices.Replica) -> Any:
        def graph(x: mx.nd.NDArray, y: mx.nd.NDArray) -> mx.nd.NDArray:
            loss = replica.graph(x, y)
            gradients = [gradient.context for gradient in replica.gradients]
            seen.append([x.context, y.context, loss.context, *gradients])
            return loss

        return graph

    found = trainer._layout
    found.replicas = [
        devices.Replica(one.device, spy(one), one.sources, one.copies, one.gradients) for one in found.replicas
    ]
    x = mx.nd.array(np.zeros((rows, 1, 12, 12), np.uint8), dtype="uint8")
    found.backward(Batch(x, mx.nd.zeros((rows,), dtype="float64"), rows, rows))
    return seen


def test_each_device_computes_its_rows_where_its_weights_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(jobs(tmp_path, {"train": images(16)}), "placed", parallelism=TWO)
    assert [set(one) for one in contexts(trainer, 5)] == [{mx.cpu(0)}, {mx.cpu(1)}]
    monkeypatch.setattr(devices, "divide", one_device_only)
    assert [set(one) for one in contexts(trainer, 5)] == [{mx.cpu(0)}]  # so the test would see it


@pytest.mark.parametrize("rows", range(6))
def test_gradient_of_any_number_of_rows(tmp_path: Path, rows: int) -> None:
    small = jobs(tmp_path, {"train": images(16)})
    x, y = images(rows, seed=4)
    x, y = mx.nd.array(x, dtype="uint8"), mx.nd.array(y, dtype="float64")
    batch = Batch(x, y, rows, 7) if rows else Batch(None, None, 0, 7)
    found = []
    for key, parallelism in (("one", {}), ("two", TWO)):
        trainer = trainer_of(small, key, parallelism=parallelism)
        loss = trainer._layout.backward(batch)
        assert (loss is None) == (rows == 0)
        found.append([array.asnumpy() for array in (trainer.setup.update.gradients + ([loss] if rows else []))])
    assert all(np.abs(one - two).max() < 1e-12 for one, two in zip(*found, strict=True))
    assert rows == 0 or any(np.abs(one).max() > 1e-3 for one in found[0])


def no_sum(law: Law, patch: pytest.MonkeyPatch) -> None:
    """Lose what the other devices computed."""
    patch.setattr(devices, "divide", lambda rows, parts: layout.divide(rows, parts)[:1])


def stale(law: Law, patch: pytest.MonkeyPatch) -> None:
    """Leave the replicas where they were."""
    first = devices.Devices._refresh
    patch.setattr(devices.Devices, "_refresh", lambda self: None if hasattr(self, "fresh") else first(self))
    patch.setattr(devices.Devices, "update", _mark)
    patch.setattr(devices.Devices, "gather", lambda self, state=True: None)


def _mark(self: Any, number: int) -> float:
    self.fresh = True
    rate: float = self.updater.apply(number)
    return rate


def clip_before_sum(law: Law, patch: pytest.MonkeyPatch) -> None:
    """Clip each device's gradient instead of their sum."""
    part, clip = devices.Devices._part, update.clip

    def clipped(self: Any, replica: Any, *rest: Any) -> Any:
        loss = part(self, replica, *rest)
        clip(replica.gradients, 1.0)
        return loss

    patch.setattr(devices.Devices, "_part", clipped)
    patch.setattr(update, "clip", lambda gradients, largest, meet=None: None)


def wrong_weight(law: Law, patch: pytest.MonkeyPatch) -> None:
    """Divide the last batch by the batch size."""
    weight = layout.Layout.weight
    patch.setattr(layout.Layout, "weight", lambda self, total, device: weight(self, 8, device))


def repeated(law: Law, patch: pytest.MonkeyPatch) -> None:
    """Give the second device the rows of the first."""
    patch.setattr(devices, "divide", same_rows_twice)


def same_rows_twice(rows: int, parts: int) -> list[slice]:
    right = layout.divide(rows, parts)
    return [right[0], slice(0, right[1].stop - right[1].start), *right[2:]]


@pytest.mark.parametrize("mutation", [no_sum, stale, clip_before_sum, wrong_weight, repeated])
def test_each_seeded_fault_breaks_the_law(law: Law, mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(law, monkeypatch)
    assert law.here(parallelism=TWO) > 1000 * BOUND


def test_replicas_that_differ_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.Devices, "_refresh", lambda self: None)
    trainer = trainer_of(jobs(tmp_path, {"train": images(16)}), "stale", parallelism=TWO)
    with pytest.raises(TrainingFailed, match=r"the weights on cpu\(1\) differ from those on cpu\(0\)") as caught:
        trainer.run()
    assert not caught.value.retryable


def test_ranks_and_devices_give_the_weights_of_one(law: Law) -> None:
    assert law.difference(ranks=2, parallelism={"strategy": "hybrid", "inside": "devices", "devices": 2}) < BOUND


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_accumulated_parts_give_the_weights_of_one(law: Law, parts: int) -> None:
    """Three rows in four parts: one of them is empty."""
    assert law.here(parallelism={"accumulate": parts}) < BOUND


def test_ranks_that_accumulate_give_the_weights_of_one(law: Law) -> None:
    assert law.difference(ranks=2, parallelism={"accumulate": 3}) < BOUND


def test_parts_are_computed_one_by_one_and_reduced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    reduced: list[int] = []
    part, reduce_ = layout.Whole._part, layout.Layout.reduce

    def counted(self: Any, batch: Batch, rows: slice) -> Any:
        sizes.append(rows.stop - rows.start)
        return part(self, batch, rows)

    monkeypatch.setattr(layout.Whole, "_part", counted)

    def noted(self: Any) -> None:
        reduced.append(len(sizes))
        reduce_(self)

    monkeypatch.setattr(layout.Layout, "reduce", noted)
    schedule = {"warmup_steps": 4}
    trainer = trainer_of(
        jobs(tmp_path, {"train": images(10)}), "parts",
        parallelism={"accumulate": 3}, epochs=1, optimizer={"learning_rate": 0.4, "schedule": schedule},
    )  # fmt: skip
    trainer.run()
    assert sizes == [3, 3, 2, 1, 1]
    assert reduced == [3, 5]
    assert trainer.at.step == 2


def test_gradients_that_are_not_zeroed_break_the_law(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    zeroed = layout.Whole.backward

    def forget(self: Any, batch: Batch) -> Any:
        kept = [gradient.copy() for gradient in self.updater.gradients]
        loss = zeroed(self, batch)
        for gradient, old in zip(self.updater.gradients, kept, strict=True):
            gradient += old
        return loss

    monkeypatch.setattr(layout.Whole, "backward", forget)
    assert law.here(parallelism={"accumulate": 2}) > 1000 * BOUND


def no_sum_of_parts(patch: pytest.MonkeyPatch) -> None:
    """Keep the gradient of the last part only."""
    part = layout.Whole._part

    def alone(self: Any, batch: Batch, rows: slice) -> Any:
        for gradient in self.updater.gradients:
            gradient[:] = 0
        return part(self, batch, rows)

    patch.setattr(layout.Whole, "_part", alone)


def part_repeated(patch: pytest.MonkeyPatch) -> None:
    """Compute the first part's rows twice, and the second's never."""
    part = layout.Whole._part

    def first_again(self: Any, batch: Batch, rows: slice) -> Any:
        return part(self, batch, slice(0, rows.stop - rows.start))

    patch.setattr(layout.Whole, "_part", first_again)


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Let parts count alike, however few rows they have."""
    part = layout.Whole._part

    def alike(self: Any, batch: Batch, rows: slice) -> Any:
        total = (rows.stop - rows.start) * min(self._parts, batch.rows)
        return part(self, dataclasses.replace(batch, total=total), rows)

    patch.setattr(layout.Whole, "_part", alike)


def clip_before_adding(patch: pytest.MonkeyPatch) -> None:
    """Clip what is there after each part, instead of the sum."""
    part, clip = layout.Whole._part, update.clip

    def clipped(self: Any, batch: Batch, rows: slice) -> Any:
        loss = part(self, batch, rows)
        clip(self.updater.gradients, 0.5)
        return loss

    patch.setattr(layout.Whole, "_part", clipped)


@pytest.mark.parametrize("mutation", [no_sum_of_parts, part_repeated, mean_of_means, clip_before_adding])
def test_each_seeded_fault_of_parts_breaks_the_law(law: Law, mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows in three parts: three, three and two."""
    mutation(monkeypatch)
    assert law.here(parallelism={"accumulate": 3}) > 1000 * BOUND


@pytest.mark.parametrize("batch_norm", [None, "synchronised"])
@pytest.mark.parametrize("parallelism", [TWO, {"accumulate": 2}], ids=["devices", "accumulate"])
def test_statistics_of_a_part_are_refused(tmp_path: Path, parallelism: Any, batch_norm: str | None) -> None:
    model = {"name": "lenet", "params": {"channels": 2, "hidden": 4, "batch_norm": True}}
    small = jobs(tmp_path, {"train": images(16, shape=(1, 16, 16))})
    with pytest.raises(SpecError, match="parallelism.batch_norm: .*frozen"):
        trainer_of(small, "parts", model=model, parallelism={**parallelism, "batch_norm": batch_norm})


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Replicas take the weights that a checkpoint brings."""
    small = jobs(tmp_path, {"train": images(24)})
    fields = {"parallelism": TWO, "optimizer": {"momentum": 0.9}}
    first = small.claim(small.job(**fields), "whole")
    loop.Trainer(parsed(first), worker_of(small, first), Alone()).run()
    first.store.delete([numbered("checkpoints/index", 6)])
    assert Checkpoints(first).newest().step == 3  # type: ignore[union-attr]
    second = small.claim(small.job(**fields), "whole", after=first.number, origin=first.claim.origin)
    loop.Trainer(parsed(second), worker_of(small, second), Alone()).run()
    whole, resumed = small.exported(first), small.exported(second)
    assert all((whole[name] == resumed[name]).all() for name in whole)


def parsed(attempt: Attempt) -> TrainingJob:
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    return job
