"""Batch and rate on more ranks: closed forms, contradictions, and what counts as the same training."""

from __future__ import annotations

from typing import Any

import pytest

from mxdist.errors import SpecError
from mxdist.launch.plan import build_plan
from mxdist.spec import TrainingJob, parse_job

LOCAL = {"world_size": 2, "batch_norm": "local", "lossy": ["batch_norm"]}
DATASET = {"manifest_uri": "s3://data/manifests/1.json", "version": "ab" * 32}


def job(ranks: int, *, batch_size: int = 32, rate: float = 0.1, **fields: Any) -> TrainingJob:
    optimizer = {"learning_rate": rate, **fields.pop("optimizer", {})}
    document: dict[str, Any] = {"name": "a", "model": {"name": "mlp"}, "dataset": DATASET, "batch_size": batch_size}
    document |= {"optimizer": optimizer, "parallelism": {"world_size": ranks}}
    found = parse_job({**document, **fields})
    assert isinstance(found, TrainingJob)
    return found


def scale(base: int = 1, warmup: int = 0) -> dict[str, Any]:
    return {"policy": "scale_lr", "base_replicas": base, "warmup_steps": warmup}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_batch_is_kept_unless_asked(ranks: int) -> None:
    found = job(ranks)
    assert found.effective() == found


@pytest.mark.parametrize(
    ("ranks", "base", "batch_size", "rate"), [(1, 1, 32, 0.1), (4, 1, 128, 0.4), (8, 2, 128, 0.4), (2, 4, 16, 0.05)]
)
def test_batch_and_rate_grow_with_the_ranks(ranks: int, base: int, batch_size: int, rate: float) -> None:
    found = job(ranks, scaling=scale(base)).effective()
    assert found.batch_size == batch_size
    assert found.optimizer.learning_rate == pytest.approx(rate, rel=1e-15)
    assert found.effective() == found  # once, not again


def test_warm_up_starts_from_the_base_rate() -> None:
    schedule = job(4, scaling=scale(warmup=10)).effective().optimizer.schedule
    assert (schedule.warmup_steps, schedule.warmup_from) == (10, 0.25)
    smaller = job(1, scaling=scale(base=4, warmup=10)).effective().optimizer
    assert (smaller.schedule.warmup_steps, smaller.learning_rate) == (0, 0.025)


@pytest.mark.parametrize(
    ("fields", "path", "words"),
    [
        ({"scaling": {"warmup_steps": 3}}, "scaling.warmup_steps", "goes with policy scale_lr"),
        ({"scaling": {"base_replicas": 2}}, "scaling.base_replicas", "goes with policy scale_lr"),
        ({"scaling": scale(base=3)}, "batch_size", "32 x 2 replicas / scaling.base_replicas 3 is no whole number"),
        ({"scaling": scale(base=4), "batch_size": 2}, "batch_size", "1 is not divisible by parallelism.world_size 2"),
        (
            {"scaling": scale(warmup=3), "optimizer": {"schedule": {"warmup_steps": 2}}},
            "scaling",
            "in optimizer.schedule, not in both",
        ),
        ({"verify_layout": True, "parallelism": LOCAL}, "verify_layout", "batch_norm local trains another model"),
        ({"verify_layout": True, "script": {"path": "a.py"}, "model": None}, "verify_layout", "Worker.verify"),
    ],
)
def test_contradictions(fields: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        job(2, **fields)
    assert words in {problem.path: problem.message for problem in caught.value.problems}.get(path, ""), caught.value


STAGES = {"stages": 2, "across": "processes"}


@pytest.mark.parametrize(
    ("layout", "batch_size", "rate"),
    [
        ({"strategy": "pipeline", **STAGES, "world_size": 2}, 32, 0.1),
        ({"strategy": "hybrid", "inside": "pipeline", **STAGES, "world_size": 6}, 96, 0.3),
        ({"strategy": "model", "stages": 4}, 32, 0.1),
        ({"strategy": "devices", "devices": 4}, 128, 0.4),
        ({"strategy": "hybrid", "inside": "devices", "devices": 2, "world_size": 3}, 192, 0.6),
        ({"accumulate": 4}, 32, 0.1),
        ({"strategy": "parameter_server", "world_size": 2, "servers": 3}, 64, 0.2),
    ],
)
def test_what_grows_is_counted_in_copies_of_the_model(layout: dict[str, Any], batch_size: int, rate: float) -> None:
    found = job(1, parallelism=layout, scaling=scale()).effective()
    assert found.batch_size == batch_size
    assert found.optimizer.learning_rate == pytest.approx(rate, rel=1e-15)


LAW: tuple[dict[str, Any], ...] = (
    {"world_size": 2, "batch_norm": "synchronised"},
    {"world_size": 4, "fusion_threshold_mb": 1, "cycle_time_ms": 5.0},
    {"accumulate": 4},
    {"strategy": "devices", "devices": 4},
    {"strategy": "pipeline", **STAGES, "world_size": 2, "micro_batches": 3, "schedule": "gpipe"},
    {"strategy": "parameter_server", "servers": 3, "kvstore": "dist_device_sync", "world_size": 2},
    {"world_size": 2, "compression_threshold": 0.3},
    {"lossy": ["compression", "batch_norm", "dist_async", "dropout"]},
)
TWO_BIT = {"strategy": "parameter_server", "compression": "2bit", "lossy": ["compression"]}
OTHER: tuple[dict[str, Any], ...] = (
    {"batch_norm": "frozen"},
    {"world_size": 2, "batch_norm": "local", "lossy": ["batch_norm"]},
    {"world_size": 2, "compression": "fp16", "lossy": ["compression"]},
    TWO_BIT,
    {**TWO_BIT, "compression_threshold": 0.3},
    {"strategy": "parameter_server", "kvstore": "dist_async", "lossy": ["dist_async"]},
    {"world_size": 2, "lossy": ["dropout"]},
)


def test_what_keeps_the_law_goes_on_from_any_layout() -> None:
    assert {job(1, parallelism=layout).training_digest() for layout in LAW} == {job(1).training_digest()}


def test_what_trains_another_model_starts_anew() -> None:
    assert len({job(1, parallelism=layout).training_digest() for layout in ({}, *OTHER)}) == 1 + len(OTHER)


def test_the_layout_of_a_training_that_is_no_law_may_change_all_the_same() -> None:
    frozen = ({"batch_norm": "frozen"}, {"batch_norm": "frozen", "strategy": "devices", "devices": 2})
    assert len({job(1, parallelism=layout).training_digest() for layout in frozen}) == 1


def test_what_counts_as_the_same_training() -> None:
    kept = {job(ranks).training_digest() for ranks in (1, 2, 4)}
    assert len(kept) == 1
    assert job(2, verify_layout=True).training_digest() in kept
    scaled = {job(ranks, scaling=scale()).training_digest() for ranks in (1, 2, 4)}
    assert len(scaled) == 3
    assert job(2, batch_size=64, rate=0.2).training_digest() in scaled


def test_plan_shows_and_records_what_is_trained() -> None:
    plan = build_plan(
        job(4, scaling=scale(base=2, warmup=50)), "key",
        runs_uri="s3://runs", python="python", workdir="/scratch", cores=(0, 1),
    )  # fmt: skip
    assert "global batch 64" in plan.work
    assert (
        "scaling     scale_lr, 4 replicas for 2: global batch 64 for 32, "
        "learning rate 0.2 for 0.1, reached from 0.1 in 50 steps\n" in plan.describe()
    )
    assert plan.effective == {"effective_batch_size": 64, "effective_learning_rate": 0.2}
