"""What has changed since a job last ran, and what it will cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mxdist.launch.bundle import Bundle
from mxdist.launch.history import Change, LastRun, changes, cost, describe, last_run
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, JobRun, Result, Store, open_store

DATASET = {"manifest_uri": "s3://b/d/manifests/1.json", "version": "a" * 64}
CODE = Bundle({"mxdist/a.py": b"1", "user/train.py": b"2"})


def job(**fields: Any) -> TrainingJob:
    return TrainingJob.parse({"name": "digits", "model": {"name": "mlp"}, "dataset": DATASET, **fields})


@pytest.fixture
def runs(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "runs"))


def ran(
    runs: Store, key: str, described: TrainingJob, *, after: int = 0, state: JobState | None = JobState.SUCCEEDED,
    took_s: float = 1800.0,
) -> Attempt:  # fmt: skip
    """Leave behind what a run does."""
    runs.create_json(f"_jobs/{key}", {"job_key": key})
    attempt = JobRun(runs, key).claim(
        described, after=after, code_digest=CODE.digest, user_code_digest=CODE.user_digest
    )
    if state is not None:
        attempt.finish(Result(state=state, ended_at=0.0, duration_s=took_s))
    return attempt


def known(runs: Store) -> LastRun:
    found = last_run(runs, "digits")
    assert found is not None
    return found


def test_newest_run_of_the_name_is_found_under_any_key(runs: Store) -> None:
    assert last_run(runs, "digits") is None
    ran(runs, "digits-1", job())
    newest = ran(runs, "digits-0", job(epochs=2), state=None)
    ran(runs, "digits-large-9", job(name="digits-large"))
    ran(runs, "other-2", job(name="other"))
    runs.create_json("_jobs/digits-unclaimed", {})
    found = known(runs)
    assert found.named == f"{newest.claim.job_key} attempt 1"
    assert (found.result, found.took_s, found.slots) == (None, 1800.0, 1)


def test_changes_are_named_by_their_paths(runs: Store) -> None:
    ran(runs, "digits-1", job(optimizer={"learning_rate": 0.1}, dataset={**DATASET, "labels": [0, 1]}))
    now = job(
        optimizer={"learning_rate": 0.05},
        dataset={**DATASET, "version": "b" * 64},
        cluster={"kind": "ssh", "hosts": ["n1", "n2"]},
        init={"model_uri": "s3://b/model"},
    )
    found = changes(known(runs), now, CODE)
    assert set(found) == {
        Change("optimizer.learning_rate", "0.1", "0.05"),
        Change("dataset.version", "a" * 12, "b" * 12),
        Change("dataset.labels", "0, 1", "(none)"),
        Change("cluster.kind", "local", "ssh"),
        Change("cluster.hosts", "", "n1, n2"),
        *(change for change in found if change.path.startswith("init")),
    }
    assert any(change.path.startswith("init") for change in found)


@pytest.mark.parametrize(
    ("files", "path"),
    [
        ({"mxdist/a.py": b"1", "user/train.py": b"3"}, "code (yours)"),
        ({"mxdist/a.py": b"9", "user/train.py": b"2"}, "code (mxdist, settings)"),
        ({"mxdist/a.py": b"1", "user/train.py": b"2"}, None),
    ],
)
def test_changed_code_is_told(runs: Store, files: dict[str, bytes], path: str | None) -> None:
    ran(runs, "digits-1", job())
    assert [change.path for change in changes(known(runs), job(), Bundle(files))] == ([path] if path else [])


def test_differences_are_one_table(runs: Store) -> None:
    ran(runs, "digits-1", job())
    last = known(runs)
    head, *lines = describe(last, changes(last, job(epochs=3, seed=7), CODE))
    assert head.startswith("since digits-1 attempt 1 (20")
    assert head.endswith(", SUCCEEDED, 30.0 min)")
    assert lines == ["  epochs  1 -> 3", "  seed    0 -> 7"]
    assert describe(last, ())[1:] == ["  nothing has changed"]


def test_job_of_another_version_is_compared_as_it_stands(runs: Store) -> None:
    attempt = ran(runs, "digits-1", job())
    attempt.claim.job["field_of_tomorrow"] = 1
    last = LastRun(attempt, None)
    assert changes(last, job(), CODE) == (Change("field_of_tomorrow", "1", "(none)"),)


def test_cost_is_price_times_slots_times_the_time_it_took(runs: Store) -> None:
    priced = job(cluster={"price_per_slot_hour": 2.5}, parallelism={"world_size": 4})
    assert cost(priced, None) is None
    ran(runs, "digits-1", job())
    ran(runs, "digits-2", job(), state=JobState.FAILED, took_s=1.0)
    found = cost(priced, known(runs))
    assert found is not None
    assert found.total == pytest.approx(4 * 0.5 * 2.5)
    assert found.describe() == (
        "5.00 = 4 slots x 0.5 h x 2.5; as long as the last run that succeeded, with 1 slot then"
    )
    assert cost(job(), known(runs)) is None


def test_cost_is_bounded_by_the_deadline_where_nothing_ran() -> None:
    found = cost(job(cluster={"price_per_slot_hour": 3}, limits={"deadline_s": 7200}), None)
    assert found is not None
    assert found.describe() == "6.00 = 1 slot x 2 h x 3; at most, for its deadline is all that is known"
