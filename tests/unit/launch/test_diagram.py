"""The drawing of every layout, against golden files, and over several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mxdist.launch.diagram import draw
from mxdist.spec import Strategy, parse_job

GOLDEN = Path(__file__).parent / "golden" / "layouts"
DATASET = {"manifest_uri": "s3://data/mnist/manifests/1.json", "version": "0" * 64}
CUTS = ["features.2", "features.5"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "allreduce": {"world_size": 4},
    "allreduce_accumulate_fp16": {
        "world_size": 2, "accumulate": 3, "compression": "fp16", "lossy": ["compression"], "controller": "mpi",
    },
    "parameter_server": {"strategy": "parameter_server", "servers": 2, "world_size": 3},
    "devices": {"strategy": "devices", "devices": 3},
    "model": {"strategy": "model", "cuts": CUTS},
    "model_balanced": {"strategy": "model", "stages": 2, "balance": "time"},
    "pipeline_devices": {"strategy": "pipeline", "stages": 2, "micro_batches": 4, "schedule": "gpipe"},
    "pipeline_processes": {
        "strategy": "pipeline", "cuts": CUTS, "micro_batches": 4, "across": "processes", "world_size": 3,
    },
    "hybrid_devices": {"strategy": "hybrid", "inside": "devices", "devices": 2, "world_size": 2},
    "hybrid_model": {"strategy": "hybrid", "inside": "model", "stages": 2, "world_size": 2},
    "hybrid_pipeline": {
        "strategy": "hybrid", "inside": "pipeline", "stages": 2, "micro_batches": 2, "across": "processes",
        "world_size": 4,
    },
}  # fmt: skip


def drawn(layout: dict[str, Any], hosts: list[str] | None = None, **fields: Any) -> str:
    document = {"name": "a", "model": {"name": "lenet"}, "dataset": DATASET, "batch_size": 24, "parallelism": layout}
    job = parse_job({**document, **fields})
    return "\n".join(draw(job, hosts or ["127.0.0.1"] * job.parallelism.world_size)) + "\n"


@pytest.mark.parametrize("name", LAYOUTS)
def test_drawing_is_the_golden_one(name: str) -> None:
    assert drawn(LAYOUTS[name]) == (GOLDEN / f"{name}.txt").read_text()


def test_every_strategy_has_a_drawing() -> None:
    assert {layout.get("strategy", "allreduce") for layout in LAYOUTS.values()} == {one.value for one in Strategy}


def test_ranks_stand_under_their_hosts() -> None:
    lines = drawn({"world_size": 4}, ["a", "a", "b", "b"]).splitlines()
    assert [line.split()[:2] for line in lines[1:7]] == [
        ["host", "a"], ["rank", "0"], ["rank", "1"], ["host", "b"], ["rank", "2"], ["rank", "3"],
    ]  # fmt: skip


def test_many_ranks_are_not_all_drawn() -> None:
    text = drawn({"world_size": 24})
    assert "and 12 more in the same way" in text
    assert "rank 12" not in text


def test_a_script_is_not_said_to_share_rows() -> None:
    text = drawn({"world_size": 2}, script={"path": "train.py"}, model=None, dataset=None)
    assert "the script's affair" in text
    assert "rows" not in text
