"""What each rank spends its time on, measured on real ranks of which one is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.worlds import images, jobs

SLOW_S = 0.25


@pytest.mark.parametrize(
    ("mutation", "kind"),
    [
        ("slow_computing_on_rank_1", "compute_s"),
        pytest.param("slow_data_on_rank_1", "data_wait_s", marks=pytest.mark.layouts),
    ],
)
def test_slow_rank_is_told_by_its_times(tmp_path: Path, mutation: str, kind: str) -> None:
    small = jobs(tmp_path, {"train": images(64)})
    attempt = small.claim(small.job(epochs=3, batch_size=8, parallelism={"world_size": 2}), "slow")
    world = small.start(attempt, mutation=mutation)
    assert world.wait() == [0, 0], world.logs()
    told = {record.key: record.value for record in small.journal(attempt)}
    assert told["slowest_rank"] == 1
    assert told[f"rank_1_{kind}"] >= SLOW_S
    assert told["rank_0_allreduce_wait_s"] > told["rank_1_allreduce_wait_s"], "who is fast waits"


@pytest.mark.layouts
def test_one_rank_and_stages_have_no_such_times(tmp_path: Path) -> None:
    """A rank alone waits for nobody, and stages wait for each other within their computing."""
    small = jobs(tmp_path, {"train": images(16)})
    stages = {"strategy": "pipeline", "across": "processes", "stages": 2, "micro_batches": 2, "world_size": 2}
    for name, parallelism in (("alone", {}), ("stages", stages)):
        attempt = small.claim(small.job(epochs=1, batch_size=8, parallelism=parallelism), name)
        assert set(small.start(attempt).wait()) == {0}
        assert "slowest_rank" not in {record.key for record in small.journal(attempt)}
