"""The trigger, without a database: what it says, what it fires, what it leaves alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.airflow.watching import trigger_of

from mxdist.errors import LaunchError, StoreError
from mxdist.launch import Life, LocalLauncher
from mxdist.launch.client import JobClient
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, JobRun, Result, State, open_store
from mxdist.store.folder import FolderStore
from mxdist.triggers.job import JobTrigger
from mxdist.triggers.watch import CURSOR, Look, Pulse, Watch

pytestmark = pytest.mark.anyio

SECRET = "canary-secret"


async def first_event(trigger: JobTrigger, timeout_s: float = 60.0) -> dict[str, Any]:
    event = await asyncio.wait_for(anext(trigger.run()), timeout_s)
    assert len(json.dumps(event.payload)) < 2000
    return dict(event.payload)


def succeed(attempt: Attempt) -> None:
    attempt.finish(Result(state=JobState.SUCCEEDED, ended_at=time.time(), metrics={"accuracy": 0.97}))


def append(attempt: Attempt, chunk: int, first: int, *lines: str) -> None:
    assert attempt.logs.append(chunk, {"first": first, "lines": list(lines)})


class TaskLog(logging.Handler):
    """What the trigger said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def task_log(monkeypatch: pytest.MonkeyPatch) -> TaskLog:
    handler, logger = TaskLog(), logging.Logger("task", logging.INFO)
    logger.addHandler(handler)
    monkeypatch.setattr(JobTrigger, "_log", logger)
    return handler


def shown(task_log: TaskLog) -> list[tuple[int, str]]:
    lines = task_log.said
    numbered = [line.strip().partition(" ") for line in lines]
    return [(int(number), text) for number, _, text in numbered if number.isdigit()]


@given(
    st.builds(
        JobTrigger,
        mxdist_conn_id=st.text(min_size=1),
        runs_uri=st.text(min_size=1),
        job_key=st.text(min_size=1),
        attempt=st.integers(1, 2**40),
        poll_s=st.floats(0.01, 1e6),
        stale_after_s=st.floats(0.01, 1e6),
        await_run=st.booleans(),
        chunk=st.integers(0, 2**40),
        line=st.integers(0, 2**40),
    )
)
def test_serialized_trigger_comes_back_the_same(trigger: JobTrigger) -> None:
    path, kwargs = trigger.serialize()
    again = JobTrigger(**json.loads(json.dumps(kwargs)))
    assert path == "mxdist.triggers.job.JobTrigger"
    assert again.serialize() == (path, kwargs)
    assert all(isinstance(value, str | int | float | bool) for value in kwargs.values())


def test_holds_no_secret(attempt: Attempt, runs_uri: str) -> None:
    assert SECRET not in json.dumps(trigger_of(attempt, runs_uri).serialize())


async def test_fires_once_the_job_is_done(attempt: Attempt, runs_uri: str) -> None:
    succeed(attempt)
    events = [event.payload async for event in trigger_of(attempt, runs_uri).run()]
    assert events == [{"attempt": 1, "status": "done", "state": "SUCCEEDED"}]


async def test_shows_every_log_line_with_its_number(attempt: Attempt, runs_uri: str, task_log: TaskLog) -> None:
    wanted = [(number, f"[0] step {number}") for number in range(1, 2501)]
    for chunk in range(50):
        append(attempt, chunk + 1, chunk * 50 + 1, *(text for _, text in wanted[chunk * 50 : chunk * 50 + 50]))
    succeed(attempt)
    await first_event(trigger_of(attempt, runs_uri))
    assert shown(task_log) == wanted


async def test_killed_trigger_repeats_at_most_one_look_and_loses_nothing(
    attempt: Attempt, runs_uri: str, task_log: TaskLog
) -> None:
    running = asyncio.create_task(first_event(trigger_of(attempt, runs_uri)))
    for chunk in range(1, 6):
        append(attempt, chunk, chunk, f"line {chunk}")
        await eventually(partial(is_shown, task_log, (chunk, f"line {chunk}")))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    before = shown(task_log)
    task_log.said.clear()
    append(attempt, 6, 6, "line 6")
    succeed(attempt)
    await first_event(trigger_of(attempt, runs_uri))
    after = shown(task_log)
    assert sorted(set(before + after)) == [(number, f"line {number}") for number in range(1, 7)]
    assert len(set(before) & set(after)) <= 1


async def test_next_trigger_of_a_task_goes_on_after_the_last_line(
    attempt: Attempt, runs_uri: str, task_log: TaskLog
) -> None:
    append(attempt, 1, 1, "one", "two")
    append(attempt, 2, 3, "three")
    succeed(attempt)
    await first_event(trigger_of(attempt, runs_uri, chunk=1, line=2))
    assert shown(task_log) == [(3, "three")]


async def test_reports_a_job_without_a_sign_of_life(attempt: Attempt, runs_uri: str) -> None:
    append(attempt, 1, 1, "last words")
    event = await first_event(trigger_of(attempt, runs_uri, stale_after_s=0.05))
    assert event == {"attempt": 1, "status": "lost", "chunk": 1, "line": 1}


async def test_platform_that_does_not_answer_says_nothing_of_the_job(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch, task_log: TaskLog
) -> None:
    """A job in a queue has no heartbeat, and the controller is too busy to say that it waits there."""
    answers = iter([LaunchError("squeue failed: Socket timed out"), Life.ALIVE, LaunchError("and once more")])

    def life(self: LocalLauncher, attempt: Attempt) -> Life:
        answer = next(answers, None)
        if answer is None:
            succeed(attempt)
            return Life.DEAD
        if isinstance(answer, LaunchError):
            raise answer
        return answer

    monkeypatch.setattr(LocalLauncher, "life", life)
    monkeypatch.setattr("mxdist.triggers.watch._PATIENT_S", 0.05)
    event = await first_event(trigger_of(attempt, runs_uri, stale_after_s=0.05))
    assert event["status"] in ("done", "lost")
    assert next(answers, None) is None
    assert "squeue failed: Socket timed out" in "".join(task_log.said)


async def test_platform_that_cannot_be_asked_fails_with_the_reason(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def life(self: LocalLauncher, attempt: Attempt) -> Life:
        raise LaunchError("the host key is another one", retryable=False)

    monkeypatch.setattr(LocalLauncher, "life", life)
    event = await first_event(trigger_of(attempt, runs_uri, stale_after_s=0.05))
    assert event["status"] == "failed"
    assert "the host key is another one" in event["message"]


def test_a_job_that_waits_in_a_queue_is_asked_about_more_seldom() -> None:
    pulse, now, asked = Pulse(10.0), 0.0, []
    while now < 400:
        if pulse.stale(0.0, now=now):
            asked.append(now)
            pulse.reset(now=now)
        now += 1
    pauses = [later - earlier for earlier, later in zip([0.0, *asked], asked, strict=False)]
    assert pauses == [11, 21, 41, 61, 61, 61, 61, 61]
    assert pulse.stale(1.0, now=401) is False
    assert pulse.stale(1.0, now=412) is True


@pytest.mark.parametrize(("beats_every", "status"), [(1, "done"), (3, "lost")], ids=["beating", "silent"])
async def test_beating_job_is_not_lost(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch, beats_every: int, status: str
) -> None:
    """Each look comes 6 s after the last, by a clock of the test's own; a job is lost after 10 s without a beat."""
    looks, real = itertools.count(1), Watch.look
    now = 0.0

    def look(self: Watch) -> Look:
        nonlocal now
        number, now = next(looks), now + 6.0
        if number % beats_every == 0:
            attempt.write_state(State(state=JobState.RUNNING, heartbeat=float(number)))
        if number == 40:
            succeed(attempt)
        return real(self)

    monkeypatch.setattr(Watch, "look", look)
    monkeypatch.setattr("mxdist.triggers.job.time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    event = await first_event(trigger_of(attempt, runs_uri, stale_after_s=10.0))
    assert event["status"] == status


async def test_fires_when_the_mlflow_run_is_known(attempt: Attempt, runs_uri: str) -> None:
    attempt.write_state(State(state=JobState.RUNNING, heartbeat=1.0, mlflow_run_url="http://mlflow/run"))
    event = await first_event(trigger_of(attempt, runs_uri, await_run=True))
    assert event["status"] == "tracked"


async def test_passed_deadline_ends_the_job(client: JobClient, runs_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxdist.triggers.job._DEADLINE_SLACK_S", 0.0)
    late = TrainingJob.parse(
        {"name": "job", "script": {"path": "/train.py"}, "limits": {"deadline_s": 0.2, "grace_s": 0}}
    )
    attempt = JobRun(client.runs, "late").claim(late, after=0)
    event = await first_event(trigger_of(attempt, runs_uri))
    assert event == {"attempt": 1, "status": "done", "state": "DEADLINE"}
    intent = attempt.cancel_intent()
    assert intent is not None
    assert intent.by == "deadline"


async def test_waits_through_an_outage_of_the_store(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch, task_log: TaskLog
) -> None:
    monkeypatch.setattr("mxdist.triggers.job._BACKOFF_S", (0.01,))
    succeed(attempt)
    failures = iter(range(5))
    real = FolderStore.read

    def flaky(self: FolderStore, key: str) -> bytes:
        if next(failures, None) is not None:
            raise StoreError("the server did not answer")
        return real(self, key)

    monkeypatch.setattr(FolderStore, "read", flaky)
    assert (await first_event(trigger_of(attempt, runs_uri)))["status"] == "done"
    assert "Still waiting for job job-1" in "".join(task_log.said)


async def test_waits_while_the_share_is_not_mounted(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch, task_log: TaskLog
) -> None:
    runs, share, gone = Path(runs_uri), Path(f"{runs_uri}-share"), threading.Event()
    monkeypatch.setattr("mxdist.triggers.job._BACKOFF_S", (0.01,))
    monkeypatch.setattr(LocalLauncher, "life", lambda *_: Life.DEAD if gone.is_set() else Life.ALIVE)
    attempt.write_state(State(heartbeat=time.time()))
    append(attempt, 1, 1, "one")
    event = asyncio.create_task(first_event(trigger_of(attempt, runs_uri, stale_after_s=0.05)))
    await eventually(lambda: attempt.store.exists(CURSOR))
    gone.set()
    runs.rename(share)
    runs.mkdir()
    await eventually(lambda: event.done() or "is that mounted?" in "".join(task_log.said))
    succeed(JobRun(open_store(str(share)), attempt.claim.job_key).attempt(1))
    runs.rmdir()
    share.rename(runs)
    assert (await event)["status"] == "done"


async def test_unusable_store_fails_with_the_reason(attempt: Attempt, runs_uri: str) -> None:
    trigger = trigger_of(attempt, runs_uri)
    trigger.attempt = 99
    event = await first_event(trigger)
    assert event["status"] == "failed"
    assert "does not exist" in event["message"]


async def test_missing_connection_fails_with_the_reason(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW_CONN_MXDIST_DEFAULT")
    event = await first_event(trigger_of(attempt, runs_uri))
    assert event["status"] == "failed"
    assert "mxdist_default" in event["message"]


async def test_tells_a_test_that_it_watches(
    attempt: Attempt, runs_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXDIST_BARRIERS", str(tmp_path))
    trigger = trigger_of(attempt, runs_uri)
    trigger.trigger_id = 7
    watching = asyncio.create_task(first_event(trigger))
    await eventually((tmp_path / "job-1.trigger-7-awaits-end.reached").exists)
    succeed(attempt)
    assert (await watching)["status"] == "done"


async def test_cleanup_never_cancels(attempt: Attempt, runs_uri: str) -> None:
    running = asyncio.create_task(first_event(trigger_of(attempt, runs_uri)))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await trigger_of(attempt, runs_uri).cleanup()
    assert attempt.cancel_intent() is None


async def test_prints_nothing(
    attempt: Attempt, runs_uri: str, task_log: TaskLog, capfd: pytest.CaptureFixture[str]
) -> None:
    append(attempt, 1, 1, "a line")
    succeed(attempt)
    await first_event(trigger_of(attempt, runs_uri))
    assert shown(task_log) == [(1, "a line")]
    assert capfd.readouterr().out == ""


def test_never_blocks_the_event_loop(
    attempt: Attempt, runs_uri: str, monkeypatch: pytest.MonkeyPatch, task_log: TaskLog
) -> None:
    """A read of the store ends only after the loop has gone round, and few lines are shown in one round."""
    for chunk in range(1, 11):
        append(attempt, chunk, (chunk - 1) * 500 + 1, *(f"line {number}" for number in range(500)))
    succeed(attempt)
    real, waited, rounds, lines_of = FolderStore.read, [], itertools.count(), Counter[int]()
    now = 0

    async def follow() -> dict[str, Any]:
        loop = asyncio.get_running_loop()

        def slow(self: FolderStore, key: str) -> bytes:
            gone_round = threading.Event()
            loop.call_soon_threadsafe(gone_round.set)
            waited.append(gone_round.wait(10))
            return real(self, key)

        monkeypatch.setattr(FolderStore, "read", slow)
        turning = asyncio.create_task(turn())
        event = await first_event(trigger_of(attempt, runs_uri))
        turning.cancel()
        return event

    async def turn() -> None:
        nonlocal now
        while True:
            now = next(rounds)
            await asyncio.sleep(0)

    def emit(record: logging.LogRecord) -> None:
        lines_of[now] += 1
        TaskLog.emit(task_log, record)

    monkeypatch.setattr(task_log, "emit", emit)
    assert asyncio.run(follow())["status"] == "done"
    assert waited
    assert all(waited)
    assert len(shown(task_log)) == 5000
    assert max(lines_of.values()) <= 100


def is_shown(task_log: TaskLog, line: tuple[int, str]) -> bool:
    return line in shown(task_log)


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "it never came true"
        await asyncio.sleep(0.01)
