"""Which jobs nobody wants any more, and what a parent run says: pure decisions."""

from __future__ import annotations

import pytest

from mxdist import reconcile

HERE = "http://airflow"
SOURCE = {"dag_id": "a_dag", "run_id": "a_run", "task_id": "train", "map_index": "-1", "url": f"{HERE}/dags/a_dag/runs"}

TABLE = [
    # run, task, wanted
    (None, None, False),
    ("running", "deferred", True),
    ("running", "running", True),
    ("running", None, True),
    ("queued", None, True),
    ("running", "scheduled", True),
    ("running", "queued", True),
    ("running", "restarting", True),
    ("running", "up_for_retry", True),
    ("running", "up_for_reschedule", True),
    ("running", "a state of some later Airflow", True),
    ("running", "success", False),
    ("running", "failed", False),
    ("running", "skipped", False),
    ("running", "removed", False),
    ("running", "upstream_failed", False),
    ("queued", "failed", False),
    ("success", "success", False),
    ("failed", "failed", False),
    ("success", None, False),
    ("failed", None, False),
    ("failed", "scheduled", True),
    ("failed", "running", True),
    ("success", "deferred", True),
]


@pytest.mark.parametrize(("run", "task", "wanted"), TABLE, ids=[f"run {run}, task {task}" for run, task, _ in TABLE])
def test_who_is_wanted(run: str | None, task: str | None, wanted: bool) -> None:
    assert (reconcile.unwanted(run, task) is None) is wanted


@pytest.mark.parametrize(
    ("run", "status"),
    [(None, "KILLED"), ("success", "FINISHED"), ("failed", "FAILED"), ("running", None), ("queued", None)],
)
def test_what_a_parent_run_says(run: str | None, status: str | None) -> None:
    assert reconcile.parent_status(run) == status


@pytest.mark.parametrize(
    "source",
    [
        {},
        {"user": "somebody", "host": "here"},
        {**SOURCE, "url": "nonsense"},
        {**SOURCE, "map_index": "x"},
        {name: value for name, value in SOURCE.items() if name != "run_id"},
    ],
    ids=["nothing", "command line", "no page", "no index", "no run"],
)
def test_jobs_that_no_airflow_asked_for(source: dict[str, str]) -> None:
    assert reconcile.TaskName.of(source) is None


def test_task_that_asked() -> None:
    task = reconcile.TaskName.of({**SOURCE, "map_index": "3"})
    assert task == reconcile.TaskName(HERE, "a_dag", "a_run", "train", 3)
