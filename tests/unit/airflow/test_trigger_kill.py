"""What a trigger does when Airflow ends its task: the wish is written, whatever else happens."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from unit.airflow.watching import trigger_of, waiting_for_a_task

from mxdist.errors import StoreError
from mxdist.launch.client import JobClient
from mxdist.spec import JobState
from mxdist.store import Attempt
from mxdist.store.folder import FolderStore
from mxdist.triggers import job

pytestmark = pytest.mark.anyio


async def test_kill_writes_the_intent_and_ends_the_attempt(attempt: Attempt, runs_uri: str) -> None:
    await trigger_of(attempt, runs_uri).on_kill()
    intent, result = attempt.cancel_intent(), attempt.result()
    assert intent is not None
    assert (intent.by, intent.marked_success) == ("user", False)
    assert result is not None
    assert result.state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("state", "cancelled", "marked_success"),
    [
        ("failed", True, False),
        ("success", True, True),
        (None, True, False),
        ("queued", True, False),
        ("deferred", False, False),
        ("running", False, False),
    ],
    ids=["marked failed", "marked success", "cleared", "cleared, no slot yet", "moved to another triggerer", "resumed"],
)
async def test_kill_asks_what_became_of_the_task(
    attempt: Attempt,
    runs_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    state: str | None,
    cancelled: bool,
    marked_success: bool,
) -> None:
    def states(**_: Any) -> dict[str, Any]:
        return {"run": {"task": state}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(states))
    await waiting_for_a_task(attempt, runs_uri).on_kill()
    intent = attempt.cancel_intent()
    assert (intent is not None) is cancelled
    assert bool(intent and intent.marked_success) is marked_success


@pytest.mark.parametrize(
    ("failures", "state", "cancelled"),
    [(2, "deferred", False), (2, "failed", True), (99, "deferred", True)],
    ids=["answers late: still wanted", "answers late: ended", "never answers"],
)
async def test_kill_asks_again_while_airflow_does_not_answer(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch, failures: int, state: str, cancelled: bool
) -> None:
    monkeypatch.setattr("mxdist.triggers.job._STATE_PAUSE_S", 0.01)
    left = iter(range(failures))

    def states(**_: Any) -> dict[str, Any]:
        if next(left, None) is not None:
            raise RuntimeError("the API server restarts")
        return {"run": {"task": state}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(states))
    await waiting_for_a_task(attempt, runs_uri).on_kill()
    assert (attempt.cancel_intent() is not None) is cancelled


async def test_kill_gives_up_asking_in_time(attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow gives on_kill 30 s in all; the intent must be written well before."""
    assert job._STATE_TRIES * (job._STATE_TIMEOUT_S + job._STATE_PAUSE_S) <= 15
    assert job._KILL_S <= 25
    monkeypatch.setattr(job, "_STATE_TIMEOUT_S", 0.02)
    monkeypatch.setattr(job, "_STATE_PAUSE_S", 0.01)
    never = threading.Event()
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: never.wait(60)))
    try:
        await waiting_for_a_task(attempt, runs_uri).on_kill()
    finally:
        never.set()
    assert attempt.cancel_intent() is not None


async def test_kill_writes_the_intent_however_often_it_is_cancelled(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The triggerer cancels a trigger anew at every round until on_kill has returned."""
    asked, answer = threading.Event(), threading.Event()

    def states(**_: Any) -> dict[str, Any]:
        asked.set()
        answer.wait(60)
        return {"run": {"task": "failed"}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(states))
    killing = asyncio.ensure_future(waiting_for_a_task(attempt, runs_uri).on_kill())
    await asyncio.to_thread(asked.wait, 60)
    for _ in range(3):
        killing.cancel()
        await asyncio.sleep(0)
    answer.set()
    await asyncio.wait([killing], timeout=60)
    assert attempt.cancel_intent() is not None


async def test_kill_writes_the_intent_before_it_waits(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_KILL_S", 1.0)
    release = threading.Event()

    def slow(*_: Any, **__: Any) -> None:
        assert attempt.cancel_intent() is not None
        release.wait(60)

    monkeypatch.setattr(JobClient, "cancel", slow)
    try:
        await asyncio.wait_for(trigger_of(attempt, runs_uri).on_kill(), 30)
    finally:
        release.set()
    assert attempt.cancel_intent() is not None


async def test_kill_writes_the_intent_through_an_outage_of_the_store(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_BACKOFF_S", (0.01,))
    failures = iter(range(3))
    real = FolderStore.create

    def flaky(self: FolderStore, key: str, data: bytes) -> bool:
        if key == "cancel.json" and next(failures, None) is not None:
            raise StoreError("the server did not answer")
        return real(self, key, data)

    monkeypatch.setattr(FolderStore, "create", flaky)
    await trigger_of(attempt, runs_uri).on_kill()
    assert attempt.cancel_intent() is not None
