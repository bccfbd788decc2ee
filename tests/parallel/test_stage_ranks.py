"""Each stage a rank of its own, and replicas of stages: the law, what a fault on one stage tells, and their overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.test_law import BOUND, Law, make_law
from parallel.test_law_models import SIZE, sequences
from parallel.worlds import images, jobs

from mxdist.runtime.checkpoint import Checkpoints
from mxdist.store.sequence import numbered

pytestmark = pytest.mark.layouts

TWO = {"strategy": "pipeline", "across": "processes", "stages": 2, "micro_batches": 3}
THREE = {**TWO, "stages": None, "cuts": ["features.2", "features.4"], "micro_batches": 4, "schedule": "gpipe"}
REPLICAS = {**TWO, "strategy": "hybrid", "inside": "pipeline", "micro_batches": 2}
OUTSIDE = {"strategy": "hybrid", "stages": 2}


@pytest.fixture(scope="module")
def sgd(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """73 examples in batches of 8: the last one has one row, so one of two replicas has none."""
    return make_law(tmp_path_factory.mktemp("ranks") / "sgd", "sgd", 73)


BOTH_WAYS = pytest.mark.parametrize("way", [{}, {"shared_memory_mb": None}], ids=["through memory", "through horovod"])


@BOTH_WAYS
def test_one_stage_a_rank(sgd: Law, way: dict[str, Any]) -> None:
    assert sgd.difference(ranks=2, parallelism={**TWO, **way}) < BOUND


def test_three_stages_with_adam(tmp_path: Path) -> None:
    law = make_law(tmp_path / "adam", "adam", 77)
    assert law.difference(ranks=3, parallelism=THREE) < BOUND


def test_transformer_encoder_on_two_ranks(tmp_path: Path) -> None:
    """What hides padding is made on each rank from the tokens."""
    law = make_law(tmp_path / "encoder", "adam", 73, network="encoder", data=sequences(73))
    model = {"name": "transformer_encoder", "params": {**SIZE, "pad_id": 0}}
    assert law.difference(ranks=2, model=model, parallelism=TWO) < BOUND


def test_replicas_of_stages(sgd: Law) -> None:
    assert sgd.difference(ranks=4, parallelism=REPLICAS) < BOUND


@pytest.mark.parametrize("inside", [{"inside": "model"}, {"inside": "pipeline", "micro_batches": 2}])
def test_stages_on_devices_of_each_rank(sgd: Law, inside: dict[str, Any]) -> None:
    assert sgd.difference(ranks=2, parallelism={**OUTSIDE, **inside}) < BOUND


def test_what_convolutions_leave_can_travel(tmp_path: Path) -> None:
    """In float32, outputs, gradients and weights of many channels lie in memory as oneDNN likes it."""
    shape = (3, 24, 24)
    splits = {"train": images(40, shape=shape), "validation": images(9, seed=1, shape=shape)}
    small = jobs(tmp_path, splits)
    fields: dict[str, Any] = {"dtype": "float32", "model": {"name": "lenet", "params": {"channels": 32}}}
    fields["optimizer"] = {"name": "sgd", "learning_rate": 0.01}
    parallelism = {**REPLICAS, "stages": None, "cuts": ["features.1"], "world_size": 4}
    whole, parts = small.train("whole", **fields), small.train("parts", **fields, parallelism=parallelism)
    assert max(float(np.abs(whole[name] - parts[name]).max()) for name in whole) < 1e-6


@BOTH_WAYS
@pytest.mark.parametrize("clip", [None, 1.0])
def test_stages_without_anything_to_train(tmp_path: Path, sgd: Law, clip: float | None, way: dict[str, Any]) -> None:
    """The first stage waits for nothing that comes back, and could be many steps ahead of the second."""
    small = jobs(tmp_path, {"train": images(100, shape=(1, 16, 16))})
    fields: dict[str, Any] = {"epochs": 1, "batch_size": 2}
    fields["init"] = {"model_uri": sgd.model_uri, "freeze": ["^features.0"]}
    fields["model"] = {"name": "lenet", "params": {"channels": 4, "hidden": 16}}
    fields["optimizer"] = {"learning_rate": 0.05, "clip_norm": clip}
    parallelism = {**TWO, "stages": None, "cuts": ["features.2"], "micro_batches": 2, "world_size": 2} | way
    whole, parts = small.train("whole", **fields), small.train("parts", **fields, parallelism=parallelism)
    assert max(float(np.abs(whole[name] - parts[name]).max()) for name in whole) < BOUND


@pytest.mark.parametrize(
    "mutation", ["stale_activation", "norm_of_one_stage", "wrong_weight_for_last_batch", "micro_batch_repeated"]
)
def test_each_seeded_fault_breaks_the_law(sgd: Law, mutation: str) -> None:
    assert sgd.difference(ranks=2, parallelism=TWO, mutation=mutation) > 1000 * BOUND


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_messages_go_through_memory_unless_the_job_forbids_it(sgd: Law, schedule: str) -> None:
    """An old message breaks the law where it would be read, and nowhere else."""
    parallelism = {**TWO, "schedule": schedule}
    assert sgd.difference(ranks=2, parallelism=parallelism, mutation="message_not_written") > 1000 * BOUND
    parallelism["shared_memory_mb"] = None
    assert sgd.difference(ranks=2, parallelism=parallelism, mutation="message_not_written") < BOUND


def test_a_replica_that_drifts_is_noticed(sgd: Law) -> None:
    attempt = sgd.jobs.claim(sgd._job(4, {"parallelism": REPLICAS}), "drift")
    world = sgd.jobs.start(attempt, mutation="stage_not_updated")  # rank 1 alone, not rank 3 of the other replica
    assert set(world.wait()) == {81}
    assert "differ from those of rank 0" in world.result()["error"]["message"]


def test_checkpoint_of_stages_goes_on_in_one_process(tmp_path: Path) -> None:
    """Rank 0 saves weights and optimizer state of all stages, and the process that goes on holds all."""
    small = jobs(tmp_path, {"train": images(73), "validation": images(9, seed=1)})
    fields: dict[str, Any] = {"checkpoints": {"every_steps": 5, "keep": 100}, "optimizer": {"name": "adam"}}
    first = small.claim(small.job(**fields, parallelism={**TWO, "world_size": 2}), "resume")
    world = small.start(first, mutation="patient")
    assert world.wait() == [0, 0], world.logs()
    first.store.delete([numbered("checkpoints/index", 20)])
    saved = Checkpoints(first).newest()
    assert saved is not None
    assert saved.step == 15
    trained = small.exported(first)
    for after, size in ((first.number, 1), (first.number + 1, 2)):
        parallelism = {**TWO, "world_size": 2} if size == 2 else {}
        next_ = small.claim(small.job(**fields, parallelism=parallelism), "resume", after=after, origin=first.number)
        world = small.start(next_)
        assert set(world.wait()) == {0}, world.logs()
        again = small.exported(next_)
        assert max(float(np.abs(trained[name] - again[name]).max()) for name in trained) < 1e-12
        next_.store.delete([numbered("checkpoints/index", 20)])
    told = {record.key: record.value for record in small.journal(first)}
    assert {"validation_loss", "validation_accuracy", "pipeline_bubble"} <= told.keys()


def test_not_a_number_names_the_rank_and_the_layer(sgd: Law) -> None:
    attempt = sgd.jobs.claim(sgd._job(2, {"parallelism": TWO}), "nan")
    world = sgd.jobs.start(attempt, mutation="nan_in_the_last_stage")
    assert world.wait() == [84, 84], world.logs()
    for rank in (0, 1):
        error = world.result(rank)["error"]
        assert error["kind"] == "nonfinite"
        assert "the gradient of output.weight is not finite at step 5 on rank 1" in error["message"]


def test_stages_work_at_the_same_time(tmp_path: Path) -> None:
    """Both ranks write down when they were at work, by the clock of their machine."""
    told, steps = _recorded(tmp_path, "recorded")
    assert _together(steps) >= 0.15, "three times what stages that work in turn may reach"
    assert [max(_live(step) for step in rank) for rank in steps] == [2, 1]
    assert [told[f"pipeline_peak_activations_{stage}"] for stage in (0, 1)] == [2, 1]


def test_stages_that_work_in_turn_are_found(tmp_path: Path) -> None:
    _, steps = _recorded(tmp_path, "recorded+in_turn", shared_memory_mb=None)  # which has no room for a whole batch
    assert _together(steps) < 0.05


def _recorded(folder: Path, mutation: str, **way: Any) -> tuple[dict[str, float], list[list[Any]]]:
    """Train two stages of about the same work; return what was told, and each rank's actions of each step."""
    small = jobs(folder, {"train": images(96, shape=(1, 32, 32))})
    fields = {"batch_size": 48, "model": {"name": "mlp", "params": {"hidden": 1024, "layers": 5}}, "epochs": 8}
    parallelism = {**TWO, "world_size": 2, "micro_batches": 6} | way
    attempt = small.claim(small.job(**fields, parallelism=parallelism), "overlap")
    world = small.start(attempt, mutation=mutation)
    assert world.wait() == [0, 0], world.logs()
    lines = [(world.folder / f"spans-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    steps = [[json.loads(line) for line in rank] for rank in lines]
    assert [len(rank) for rank in steps] == [16, 16]
    return {record.key: record.value for record in small.journal(attempt)}, steps


def _together(steps: list[list[Any]]) -> float:
    """Return for how much of the shorter stage's time at work both were: in the best step, when others let them."""
    shares = []
    for first, second in zip(*steps, strict=True):
        busy = [sum(end - begin for _, begin, end in step) for step in (first, second)]
        shares.append(_overlap(first, second) / min(busy))
    return max(shares)


def _overlap(first: list[Any], second: list[Any]) -> float:
    """Return the seconds in which both stages were at work."""
    return sum(max(0.0, min(a[2], b[2]) - max(a[1], b[1])) for a in first for b in second)


def _live(step: list[Any]) -> int:
    """Return the most micro-batches between their forward and their backward pass."""
    live = most = 0
    for (forward, _), _, _ in step:
        live += 1 if forward else -1
        most = max(most, live)
    return most
