"""What is settled when a DAG run ends or a task is marked, and that Airflow never waits for it."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session
from unit.airflow.world import end

from mxdist import listeners
from mxdist.spec import JobState
from mxdist.store import Attempt
from stack.mlflow import Mlflow

RUN: Any = SimpleNamespace(dag_id="a_dag", run_id="a_run")
BEGUN, HOUR = datetime(2026, 3, 1, 12, tzinfo=UTC), timedelta(hours=1)
TASK: Any = SimpleNamespace(dag_id="a_dag", run_id="a_run", task_id="train", map_index=-1)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_BACKGROUND", listeners.Background())
    monkeypatch.setattr(listeners, "_PAUSE_S", 0.01)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, attempt: Attempt, runs_uri: str) -> list[listeners.Note]:
    """The notes for which Airflow's database was asked; it always answers with the one job."""
    place = {
        "mxdist_conn_id": "mxdist_default",
        "mlflow_conn_id": "mxdist_mlflow",
        "runs_uri": runs_uri,
        "job_key": attempt.claim.job_key,
        "parent": "a_dag/a_run",
    }
    notes: list[listeners.Note] = []

    def places_of(note: listeners.Note) -> list[dict[str, Any]]:
        notes.append(note)
        return [place]

    monkeypatch.setattr(listeners, "places_of", places_of)
    monkeypatch.setenv(
        "AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps({"conn_type": "mxdist_mlflow", "host": "http://127.0.0.1:9"})
    )
    return notes


def settled() -> None:
    assert listeners._BACKGROUND.drain(120)


@pytest.mark.parametrize(("succeeded", "status"), [(True, "FINISHED"), (False, "FAILED")], ids=["success", "failed"])
def test_end_of_a_run_closes_its_parent_in_mlflow(
    asked: list[listeners.Note],
    mlflow_server: Mlflow,
    monkeypatch: pytest.MonkeyPatch,
    attempt: Attempt,
    succeeded: bool,
    status: str,
) -> None:
    end(attempt)
    connection = {"conn_type": "mxdist_mlflow", "host": mlflow_server.url}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(connection))
    client = MlflowClient(mlflow_server.url)
    experiment = client.create_experiment(f"listener-{status}-{time.time_ns()}")
    mine = client.create_run(experiment, tags={"mxdist.parent": "a_dag/a_run"}).info.run_id
    other = client.create_run(experiment, tags={"mxdist.parent": "a_dag/another_run"}).info.run_id
    hook = listeners.on_dag_run_success if succeeded else listeners.on_dag_run_failed
    hook(RUN, "")
    settled()
    assert client.get_run(mine).info.status == status
    assert client.get_run(other).info.status == "RUNNING"


def test_end_of_a_run_ends_a_job_that_nobody_waits_for(asked: list[listeners.Note], attempt: Attempt) -> None:
    listeners.on_dag_run_failed(RUN, "")
    settled()
    intent = attempt.cancel_intent()
    assert intent is not None
    assert (intent.by, intent.marked_success) == ("airflow", False)


def test_end_of_a_run_gives_up_what_was_preempted(asked: list[listeners.Note], attempt: Attempt) -> None:
    end(attempt, JobState.PREEMPTED)
    listeners.on_dag_run_failed(RUN, "")
    settled()
    given_up = attempt.given_up()
    assert given_up is not None
    assert (given_up.by, given_up.reason) == ("airflow", "the DAG run is over in Airflow")
    assert attempt.cancel_intent() is None


@pytest.mark.parametrize("mark", ["success", "failed"])
def test_end_of_a_run_whose_task_was_marked_is_the_users_doing(
    asked: list[listeners.Note], attempt: Attempt, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    """The scheduler may notice the end of the run before the API server has told of the mark."""
    note = listeners.Note("a_dag", "a_run", mark == "success")
    place = listeners.places_of(note)[0]
    monkeypatch.setattr(listeners, "places_of", lambda _: [{**place, "marked": mark}])
    listeners.settle(note)
    intent = attempt.cancel_intent()
    assert intent is not None
    assert (intent.by, intent.marked_success) == ("user", mark == "success")
    assert f"marked as {mark}" in intent.reason


@pytest.mark.parametrize(
    ("state", "next_method", "by_hand", "mark"),
    [
        pytest.param("success", "execute_complete", False, "success", id="marked success while it waits"),
        pytest.param("failed", "execute_complete", False, "failed", id="marked failed while it waits"),
        pytest.param("success", None, False, None, id="succeeded"),
        pytest.param("failed", None, False, None, id="failed itself"),
        pytest.param("skipped", "execute_complete", False, None, id="timed out"),
        pytest.param("deferred", "execute_complete", False, None, id="waits"),
        pytest.param(None, None, False, None, id="cleared"),
        pytest.param("success", None, True, "success", id="marked success while it submits"),
        pytest.param("failed", None, True, "failed", id="marked failed while it submits"),
        pytest.param("skipped", "execute_complete", True, "skipped", id="marked skipped"),
        pytest.param("deferred", "execute_complete", True, None, id="waits, another was marked"),
        pytest.param("running", None, True, None, id="submits, another was marked"),
        pytest.param(None, None, True, None, id="marked, then cleared"),
    ],
)
def test_who_ended_a_task(state: str | None, next_method: str | None, by_hand: bool, mark: str | None) -> None:
    assert listeners.marked(state, next_method, by_hand) == mark


@pytest.fixture
def database() -> Iterator[Session]:
    """A database with the tables that are asked."""
    from airflow.models import import_all_models
    from airflow.models.log import Log
    from airflow.models.task_state_store import TaskStateStoreModel
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel

    import_all_models()
    engine = create_engine("sqlite://")
    tables: Any = [TaskInstance.__table__, XComModel.__table__, TaskStateStoreModel.__table__, Log.__table__]
    TaskInstance.metadata.create_all(engine, tables=tables)
    with Session(engine) as session:
        yield session
    engine.dispose()


def put_task(
    database: Session, task_id: str, state: str, next_method: str | None, *, run_id: str = "a_run", key: str
) -> None:
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel

    place = {"dag_id": "a_dag", "run_id": run_id, "task_id": task_id, "map_index": -1}
    pool = {"pool": "p", "pool_slots": 1, "queue": "q", "priority_weight": 1, "max_tries": 1}
    task = {"id": uuid.uuid4(), "state": state, "next_method": next_method, "try_number": 1, "start_date": BEGUN}
    database.execute(insert(TaskInstance).values(**place, **task, **pool))
    value = json.dumps({"job_key": f"{run_id}-{task_id}"})
    database.execute(insert(XComModel).values(**place, dag_run_id=hash(run_id), key=key, value=value))


def test_database_says_where_jobs_are_and_which_tasks_were_marked(database: Session) -> None:
    put_task(database, "marked", "failed", "execute_complete", key="mxdist_job")
    put_task(database, "ended", "failed", None, key="mxdist_job")
    put_task(database, "no_job", "success", None, key="return_value")
    put_task(database, "marked", "success", "execute_complete", run_id="another_run", key="mxdist_job")
    of_run = listeners._places(database, listeners.Note("a_dag", "a_run", False))
    of_task = listeners._places(database, listeners.Note("a_dag", "a_run", False, "ended"))
    assert sorted((place["job_key"], place["marked"]) for place in of_run) == [
        ("a_run-ended", None),
        ("a_run-marked", "failed"),
    ]
    assert [place["job_key"] for place in of_task] == ["a_run-ended"]


def test_place_of_a_job_outlives_the_xcoms_of_its_try(database: Session) -> None:
    """A new try, or a clear, takes the XComs away before the task says anything."""
    from airflow.models.task_state_store import TaskStateStoreModel

    put_task(database, "train", "failed", "execute_complete", key="return_value")
    own = {"dag_id": "a_dag", "run_id": "a_run", "task_id": "train", "map_index": -1, "dag_run_id": 1}
    for key, value in (("mxdist_job", {"job_key": "a_key"}), ("users_own", {"job_key": "other"})):
        database.execute(insert(TaskStateStoreModel).values(**own, key=key, value=json.dumps(value)))
    note = listeners.Note("a_dag", "a_run", False)
    assert listeners._places(database, note) == [{"job_key": "a_key", "marked": "failed"}]
    assert listeners._places(database, listeners.Note("a_dag", "a_run", False, "other")) == []


def test_place_in_a_state_store_of_the_users_own_is_left_to_the_reconciler(database: Session) -> None:
    from airflow.models.task_state_store import TaskStateStoreModel

    own = {"dag_id": "a_dag", "run_id": "a_run", "task_id": "train", "map_index": -1, "dag_run_id": 1}
    elsewhere = json.dumps({"__airflow_external_ref__": "s3://somewhere"})
    database.execute(insert(TaskStateStoreModel).values(**own, key="mxdist_job", value=elsewhere))
    assert listeners._places(database, listeners.Note("a_dag", "a_run", False)) == []


BODY = {"new_state": "failed", "include_upstream": False}
RUNS = {"actions": [{"action": "update", "entities": [{"dag_run_id": "a_run", "state": "failed"}]}]}
TASKS = {"actions": [{"action": "update", "entities": [{"dag_run_id": "a_run", "new_state": "failed"}]}]}


@pytest.mark.parametrize(
    ("event", "about", "body", "mark"),
    [
        pytest.param("patch_task_instance", {"task_id": "train"}, BODY, "failed", id="task"),
        pytest.param("patch_task_instance", {"task_id": "other"}, BODY, None, id="another task"),
        pytest.param(
            "patch_task_instance", {"task_id": "other"}, {**BODY, "include_upstream": True}, "failed", id="taken along"
        ),
        pytest.param("patch_task_group_instances", {}, BODY, "failed", id="group"),
        pytest.param("patch_dag_run", {}, {"state": "failed"}, "failed", id="run"),
        pytest.param("patch_task_instance", {"task_id": "train"}, {"note": "good"}, None, id="only a note"),
        pytest.param("patch_dag_run", {"run_id": "another_run"}, {"state": "failed"}, None, id="another run"),
        pytest.param("patch_dag_run", {"dttm": BEGUN - HOUR}, {"state": "failed"}, None, id="before it began"),
        pytest.param("bulk_dag_runs", {"dag_id": "~", "run_id": None}, RUNS, "failed", id="runs"),
        pytest.param("bulk_task_instances", {"dag_id": "~", "run_id": "~"}, TASKS, "failed", id="tasks"),
        pytest.param("post_clear_task_instances", {"task_id": "train"}, {"new_state": "x"}, None, id="clear"),
    ],
)
def test_audit_log_says_whether_a_task_that_submits_was_marked(
    database: Session, event: str, about: dict[str, Any], body: dict[str, Any], mark: str | None
) -> None:
    from airflow.models.log import Log

    put_task(database, "train", "failed", None, key="mxdist_job")
    entry = {"dag_id": "a_dag", "run_id": "a_run", "dttm": BEGUN + HOUR, "extra": json.dumps(body), **about}
    database.execute(insert(Log).values(event=event, **entry))
    (place,) = listeners._places(database, listeners.Note("a_dag", "a_run", False))
    assert place["marked"] == mark


def test_late_note_leaves_the_job_of_the_next_life_alone(asked: list[listeners.Note], attempt: Attempt) -> None:
    before = attempt.claim.submitted_at - 1
    listeners.settle(listeners.Note("a_dag", "a_run", False, at=before))
    assert asked
    assert attempt.cancel_intent() is None


def test_one_place_that_cannot_be_reached_does_not_save_the_others(
    asked: list[listeners.Note], attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = listeners.Note("a_dag", "a_run", False)
    place = listeners.places_of(note)[0]
    monkeypatch.setattr(listeners, "places_of", lambda _: [{**place, "mxdist_conn_id": "deleted"}, place])
    listeners.settle(note)
    assert attempt.cancel_intent() is not None


def test_end_of_a_run_leaves_a_finished_job_alone(asked: list[listeners.Note], attempt: Attempt) -> None:
    end(attempt)
    listeners.on_dag_run_success(RUN, "")
    settled()
    assert attempt.cancel_intent() is None


@pytest.mark.parametrize("mark", ["success", "failed", "skipped"])
def test_mark_by_hand_ends_the_job(asked: list[listeners.Note], attempt: Attempt, mark: str) -> None:
    if mark == "failed":
        listeners.on_task_instance_failed(None, TASK, "marked")
    else:
        getattr(listeners, f"on_task_instance_{mark}")(None, TASK)
    settled()
    assert asked == [listeners.Note("a_dag", "a_run", mark == "success", "train", -1)]
    intent = attempt.cancel_intent()
    assert intent is not None
    assert (intent.by, intent.marked_success) == ("user", mark == "success")
    assert f"marked as {mark}" in intent.reason


def test_task_that_ends_by_itself_keeps_its_job(asked: list[listeners.Note], attempt: Attempt) -> None:
    """A worker that was lost looks like this too, and its next try reconnects."""
    listeners.on_task_instance_success("running", TASK)
    listeners.on_task_instance_failed("running", TASK, "worker lost")
    settled()
    assert asked == []
    assert attempt.cancel_intent() is None


def test_airflow_never_waits_and_never_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answer, over = threading.Event(), []

    def broken(note: listeners.Note) -> list[dict[str, Any]]:
        answer.wait(60)
        over.append(note)
        raise RuntimeError("the database is gone")

    monkeypatch.setattr(listeners, "places_of", broken)
    for _ in range(5):
        listeners.on_dag_run_success(RUN, "")
    assert over == []
    answer.set()
    settled()
    assert len(over) == 5


def test_far_too_many_ended_runs_are_dropped_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_WAITING_AT_MOST", 3)
    monkeypatch.setattr(listeners, "_BACKGROUND", listeners.Background())
    seen: list[listeners.Note] = []
    answer = threading.Event()

    def slow(note: listeners.Note) -> list[dict[str, Any]]:
        seen.append(note)
        answer.wait(60)
        return []

    monkeypatch.setattr(listeners, "places_of", slow)
    for _ in range(50):
        listeners.on_dag_run_success(RUN, "")
    answer.set()
    settled()
    assert len(seen) in (3, 4)  # those that wait, and perhaps one that was being settled


def test_mlflow_out_of_reach_gives_up_soon(asked: list[listeners.Note], attempt: Attempt) -> None:
    end(attempt)
    listeners.on_dag_run_success(RUN, "")
    assert listeners._BACKGROUND.drain(60)
    result = attempt.result()
    assert result is not None
    assert result.state is JobState.SUCCEEDED
