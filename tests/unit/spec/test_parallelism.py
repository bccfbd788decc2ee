"""Layouts that contradict themselves are refused, each wrong field by its path, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from mxdist.errors import SpecError
from mxdist.spec import Parallelism, parse_job


def problems(**document: Any) -> dict[str, str]:
    try:
        Parallelism.parse(document)
    except SpecError as error:
        return {problem.path: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    ("document", "path", "words"),
    [
        ({"accumulate": 2, "strategy": "devices", "devices": 2}, "accumulate", "allreduce, parameter_server"),
        ({"servers": 2}, "servers", "goes with strategy parameter_server"),
        ({"strategy": "parameter_server", "servers": 0}, "servers", "greater than or equal to 1"),
        ({"strategy": "parameter_server", "kvstore": "dist_async"}, "kvstore", "add dist_async to lossy"),
        (
            {"strategy": "parameter_server", "kvstore": "dist_async", "lossy": ["dist_async"], "compression": "2bit"},
            "compression",
            "add compression to lossy",
        ),
        (
            {
                "strategy": "parameter_server",
                "kvstore": "dist_async",
                "lossy": ["dist_async", "compression"],
                "compression": "2bit",
            },
            "compression",
            "goes with kvstore dist_sync or dist_device_sync",
        ),
        (
            {
                "strategy": "parameter_server",
                "kvstore": "dist_async",
                "lossy": ["dist_async"],
                "batch_norm": "synchronised",
            },
            "batch_norm",
            "do not wait for each other's statistics; use frozen",
        ),
        ({"strategy": "parameter_server", "compression": "fp16"}, "compression", "goes with strategy allreduce"),
        ({"compression": "fp16"}, "compression", "add compression to lossy"),
        ({"batch_norm": "local"}, "batch_norm", "add batch_norm to lossy"),
        ({"batch_norm": "synchronised", "accumulate": 2}, "batch_norm", "use frozen"),
        ({"strategy": "devices"}, "devices", "is required"),
        ({"strategy": "devices", "devices": 2, "world_size": 2}, "world_size", "hybrid with inside devices"),
        ({"strategy": "model"}, "stages", "is required unless there are cuts"),
        ({"strategy": "model", "stages": 1}, "stages", "one stage is the whole network: use strategy allreduce"),
        ({"strategy": "pipeline", "stages": 1, "micro_batches": 2}, "stages", "use strategy allreduce"),
        ({"strategy": "hybrid", "inside": "model", "stages": 1}, "stages", "use strategy allreduce"),
        (
            {"strategy": "hybrid", "inside": "pipeline", "stages": 1, "world_size": 2},
            "stages",
            "use strategy allreduce",
        ),
        ({"strategy": "model", "stages": 3, "cuts": ["features.2"]}, "stages", "1 cuts make 2 stages, not 3"),
        ({"strategy": "model", "cuts": ["a", "a"]}, "cuts", "twice"),
        ({"strategy": "model", "stages": 2, "micro_batches": 2}, "micro_batches", "goes with strategy pipeline"),
        ({"strategy": "pipeline", "stages": 2, "world_size": 2}, "world_size", "one process"),
        ({"strategy": "pipeline", "stages": 2, "across": "processes"}, "world_size", "1 ranks cannot hold 2 stages"),
        (
            {"strategy": "pipeline", "stages": 2, "across": "processes", "world_size": 4},
            "world_size",
            "use strategy hybrid",
        ),
        ({"strategy": "hybrid"}, "inside", "is required"),
        ({"strategy": "hybrid", "inside": "devices", "devices": 2, "stages": 2}, "stages", "goes with inside model"),
        (
            {"strategy": "hybrid", "inside": "pipeline", "stages": 2, "across": "processes", "world_size": 3},
            "world_size",
            "3 ranks cannot hold 2 stages",
        ),
    ],
)
def test_contradictions(document: dict[str, Any], path: str, words: str) -> None:
    found = problems(**document)
    assert words in found.get(path, ""), found


def test_all_contradictions_at_once() -> None:
    found = problems(strategy="allreduce", devices=2, micro_batches=3, servers=2, inside="model", stages=2)
    assert set(found) == {"devices", "micro_batches", "servers", "inside", "stages"}


@pytest.mark.parametrize(
    ("document", "replicas", "stages"),
    [
        ({"world_size": 4}, 4, 1),
        ({"strategy": "pipeline", "cuts": ["a", "b"], "across": "processes", "world_size": 3}, 1, 3),
        ({"strategy": "hybrid", "inside": "pipeline", "stages": 2, "across": "processes", "world_size": 6}, 3, 2),
        ({"strategy": "hybrid", "inside": "model", "stages": 2, "world_size": 3}, 3, 2),
        ({"strategy": "devices", "devices": 3}, 1, 1),
    ],
)
def test_who_shares_a_batch(document: dict[str, Any], replicas: int, stages: int) -> None:
    layout = Parallelism.parse(document)
    assert (layout.replicas, layout.stage_count) == (replicas, stages)


@pytest.mark.parametrize(
    ("batch_size", "layout", "path", "words"),
    [
        (3, {"accumulate": 4}, "batch_size", "share of 3 rows is less than parallelism.accumulate 4"),
        (4, {"strategy": "pipeline", "stages": 2, "micro_batches": 5}, "batch_size", "micro_batches 5"),
    ],
)
def test_batches_smaller_than_their_parts(batch_size: int, layout: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(_job(batch_size=batch_size, parallelism=layout))
    assert words in {problem.path: problem.message for problem in caught.value.problems}[path]


def test_parameter_servers_compute_in_float32() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(_job(dtype="float64", parallelism={"strategy": "parameter_server"}))
    assert {problem.path for problem in caught.value.problems} == {"dtype"}


FREE = {"strategy": "parameter_server", "kvstore": "dist_async", "lossy": ["dist_async"]}


@pytest.mark.parametrize(
    ("fields", "path", "named"),
    [
        ({"optimizer": {"clip_norm": 1.0}}, "optimizer", ["clip_norm"]),
        ({"optimizer": {"schedule": {"decay": "cosine"}}}, "optimizer", ["schedule.decay"]),
        (
            {"optimizer": {"clip_norm": 1.0, "schedule": {"decay": "step", "warmup_steps": 3}}},
            "optimizer",
            ["clip_norm", "schedule.decay", "schedule.warmup_steps"],
        ),
        ({"scaling": {"policy": "scale_lr", "warmup_steps": 3}}, "scaling", ["warmup_steps"]),
    ],
)
def test_what_servers_that_update_cannot_do(fields: dict[str, Any], path: str, named: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(_job(parallelism=FREE, **fields))
    message = {problem.path: problem.message for problem in caught.value.problems}[path]
    assert message.startswith(", ".join(named) + ": ")
    assert "use kvstore dist_sync" in message
    parse_job(_job(parallelism={"strategy": "parameter_server"}, **fields))


def _job(**fields: Any) -> dict[str, Any]:
    dataset = {"manifest_uri": "s3://data/manifests/1.json", "version": "ab" * 32}
    return {"name": "a", "model": {"name": "lenet"}, "dataset": dataset, **fields}


@pytest.mark.parametrize(
    ("document", "devices"),
    [
        ({"world_size": 4}, 1),
        ({"strategy": "devices", "devices": 3}, 3),
        ({"strategy": "hybrid", "inside": "devices", "devices": 2, "world_size": 2}, 2),
        ({"strategy": "model", "stages": 3}, 3),
        ({"strategy": "pipeline", "cuts": ["a", "b"], "across": "processes", "world_size": 3}, 1),
    ],
)
def test_how_many_devices_a_rank_has(document: dict[str, Any], devices: int) -> None:
    assert Parallelism.parse(document).devices_per_rank == devices
