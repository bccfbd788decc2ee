"""What stages hold, when, and what they take from each other: memory, threads, messages, cuts."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import pytest
from parallel.inprocess import trainer_of, worker_of
from parallel.test_stages import GPIPE, MODEL, ONE_BY_ONE
from parallel.worlds import Jobs, images, jobs, poll

from mxdist.runtime import loop, verify
from mxdist.runtime.parallel import Alone, runner, stages
from mxdist.runtime.parallel.half import HalfSum
from mxdist.runtime.parallel.links import Ways
from mxdist.runtime.parallel.pipeline import DeviceStages, RankStages, stage_update
from mxdist.spec import TrainingJob


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return jobs(tmp_path_factory.mktemp("upkeep"), {"train": images(41)})


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Let a collection of garbage look at what the test makes, and at nothing older: that would take long."""
    gc.freeze()
    yield
    gc.unfreeze()


class Watched(mx.autograd.Function):  # type: ignore[misc]  # mxnet is untyped
    """Change nothing; live as long as the graph of one micro-batch, which MXNet keeps with what it holds."""

    def forward(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        return x.copy()

    def backward(self, gradient: mx.nd.NDArray) -> mx.nd.NDArray:
        return gradient.copy()


class Census:
    """Counts the graphs of one stage that are alive, before each action."""

    def __init__(self, inner: runner.Runner, bound_s: float = 60.0) -> None:
        self._bound_s = bound_s
        self.counts: list[int] = []
        self._alive: weakref.WeakSet[Watched] = weakref.WeakSet()
        training, forward, backward = inner.stage.training, inner._forward, inner._backward

        def watch(*inputs: mx.nd.NDArray) -> mx.nd.NDArray:
            watched = Watched()
            self._alive.add(watched)
            return watched(training(*inputs))

        inner.stage = dataclasses.replace(inner.stage, training=watch)  # type: ignore[arg-type]
        inner._forward = lambda *given: (self._count(inner), forward(*given))[1]  # type: ignore[method-assign]
        inner._backward = lambda *given: (self._count(inner), backward(*given))[1]  # type: ignore[method-assign]

    def _count(self, inner: runner.Runner) -> None:
        """Note how many are alive.

        MXNet's engine drops its last reference a moment after the numbers are there, and a ``Function`` that no graph
        has any more is in a circle with its own callbacks.
        """
        until = time.monotonic() + self._bound_s
        while len(self._alive) > len(inner._live) and time.monotonic() < until:
            mx.nd.waitall()
            gc.collect()
        self.counts.append(len(self._alive))
        if len(self._alive) > len(inner._live):
            raise MemoryError(f"stage {inner.stage.index} holds {len(self._alive)} micro-batches")


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(("schedule", "peaks"), [("gpipe", [4, 4, 4]), ("1f1b", [3, 2, 1])])
def test_activations_held_are_those_that_the_schedule_promises(small: Jobs, schedule: str, peaks: list[int]) -> None:
    parallelism = {**GPIPE, "balance": "parameters", "schedule": schedule}
    attempt = small.claim(small.job(epochs=1, batch_size=21, parallelism=parallelism), schedule)
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    trainer = loop.Trainer(job, worker_of(small, attempt), Alone())
    counted = [Census(inner) for inner in trainer._layout.runners]  # type: ignore[attr-defined]
    trainer.run()
    assert [max(census.counts) for census in counted] == peaks
    told = {record.key: record.value for record in small.journal(attempt)}
    assert [told[f"pipeline_peak_activations_{stage}"] for stage in range(3)] == peaks
    assert 0 < told["pipeline_bubble"] < 1


@pytest.mark.usefixtures("few_objects")
def test_a_graph_that_outlives_its_backward_pass_is_found(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(small, "leak", parallelism={**GPIPE, "balance": "parameters"})
    backward, kept = runner.Runner._backward, []

    def keep(self: runner.Runner, action: Any, batch: Any, message: Any) -> None:
        kept.append(self._live[action.part])
        backward(self, action, batch, message)

    monkeypatch.setattr(runner.Runner, "_backward", keep)
    for inner in trainer._layout.runners:  # type: ignore[attr-defined]
        Census(inner, bound_s=1.0)
    with pytest.raises(MemoryError, match="holds"):
        trainer.run()


class Doubling(Alone):
    """Two ranks with the same gradients; takes arrays of one device only, as Horovod does with GPUs."""

    size = 2

    def sum_(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        assert len({array.context for array in arrays}) == 1
        for array in arrays:
            array *= 2


@pytest.mark.parametrize("half", [None, HalfSum()])
def test_gradients_of_several_devices_are_summed_on_one(small: Jobs, half: HalfSum | None) -> None:
    planned = trainer_of(small, f"one-place-{half is None}", parallelism=MODEL)._layout
    planned.group, planned.half = Doubling(), half
    gradients = planned.updater.gradients
    places = [gradient.context for gradient in gradients]
    assert set(places) == {mx.cpu(0), mx.cpu(1)}
    for number, gradient in enumerate(gradients):
        gradient[:] = number + 1
    planned.reduce()
    assert [gradient.context for gradient in gradients] == places
    assert [set(gradient.asnumpy().ravel()) for gradient in gradients] == [{2 * (i + 1)} for i in range(len(places))]


def test_threads_of_stages_end_with_the_training(small: Jobs) -> None:
    trainer_of(small, "threads", epochs=1, parallelism=ONE_BY_ONE | {"cuts": ["output"]}).run()
    poll(lambda: not _threads(), what="the stages' threads to end", bound_s=60)


def test_threads_of_stages_end_with_the_verification(small: Jobs) -> None:
    attempt = small.claim(small.job(parallelism=MODEL), "verified")
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    verify.check(job, worker_of(small, attempt), Alone())
    poll(lambda: not _threads(), what="the stages' threads to end", bound_s=60)


def _threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("mxdist-stage")]


def test_state_is_gathered_for_checkpoints_only(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(DeviceStages, "gather", lambda self, state: asked.append(state))
    trainer_of(small, "asked", epochs=2, checkpoints={"every_epochs": 2}, parallelism=MODEL).run()
    assert asked == [False, False, True]


def test_ranks_take_from_each_other_what_they_have_not(small: Jobs) -> None:
    """Weights and state of each stage travel at most once after a step, and state only for a checkpoint."""
    cut = trainer_of(small, "take", optimizer={"name": "adam"}, parallelism=MODEL).setup
    assert cut.stages is not None
    travelled: list[str] = []

    def broadcast_(array: mx.nd.NDArray, root_rank: int, name: str, process_set: str) -> None:
        travelled.append(f"{root_rank} {name}")

    hvd = SimpleNamespace(broadcast_=broadcast_)
    sets: Any = SimpleNamespace(stage=0, stages=2, of_stage=None, of_replica="both", hvd=hvd, rank_of=lambda one: one)
    job = small.job(optimizer={"name": "adam"}, parallelism=MODEL)
    updater = stage_update(cut.stages, 0, job.optimizer, 20)
    planned = RankStages(cut.stages, updater, Alone(), sets, Ways(None, None), job.parallelism)
    weights = {f"{one.index} mxdist.gather.{name}" for one in cut.stages.stages for name in one.parameters}
    state = {f"{weight}/{position}" for weight in weights for position in (0, 1)}  # Adam's two averages

    def taken(*, state: bool) -> list[str]:
        travelled.clear()
        planned.gather(state=state)
        return sorted(travelled)

    assert taken(state=False) == sorted(weights)
    assert taken(state=True) == sorted(state)
    assert taken(state=True) == taken(state=False) == []
    planned.updater.meet = None
    planned.update(1)
    assert taken(state=True) == sorted(weights | state)
    assert taken(state=False) == []


def test_a_world_measures_time_once(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured anew is never the same: verification and training would be cut differently."""
    times = itertools.chain([9.0, 1.0, 1.0], [1.0, 1.0, 9.0])
    monkeypatch.setattr(stages, "_seconds", lambda layer, x, inputs: next(times))
    group = Alone()
    assert [first_cut(small, f"once-{turn}", group) for turn in range(2)] == ["features.1"] * 2


class Second(Alone):
    """Rank 1 of a world whose rank 0 tells what it measured."""

    rank = 1

    def share(self, decide: Callable[[], Any]) -> Any:
        return [1.0, 1.0, 9.0]


def test_only_rank_0_measures_time(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_seconds", lambda *given: pytest.fail("measured on rank 1, too"))
    assert first_cut(small, "second", Second()) == "output"


def first_cut(small: Jobs, key: str, group: Alone) -> str:
    """Return the layer that the second of two stages begins with, when they are balanced by time."""
    attempt = small.claim(small.job(parallelism={**MODEL, "balance": "time"}), key)
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    built = loop.Trainer(job, worker_of(small, attempt), group).setup.stages
    assert built is not None
    return built.stages[1].layers[0]
