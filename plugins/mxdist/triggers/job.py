"""The one trigger: wait for a job's end by reading the run store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from mxdist.barriers import reach
from mxdist.errors import LaunchError, MxdistError, StoreError
from mxdist.hooks.cluster import ClusterHook
from mxdist.launch.base import Life
from mxdist.launch.client import JobClient
from mxdist.store import Attempt, JobRun
from mxdist.triggers.watch import Cursor, Look, ProgressLine, Pulse, Watch

T = TypeVar("T")

_LINES_AT_ONCE = 100  # then other triggers get their turn
_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_KILL_S = 24.0  # Airflow gives on_kill 30 s
_STATE_TRIES = 3
_STATE_TIMEOUT_S = 4.0  # of each try
_STATE_PAUSE_S = 0.5
_STILL_WANTED = {"deferred", "running"}
_ENDED = "the task was ended in Airflow"
_MARKED = "the task was marked as success in Airflow"
_DEADLINE_SLACK_S = 10.0  # beside the job's own grace: its supervisor ends it at the deadline, the trigger makes sure


class JobTrigger(BaseTrigger):
    """Follow one attempt of a job: log lines into the task's log, then one event.

    The trigger reads the run store, never the processes: a restarted triggerer goes on where the last one stopped.
    Its event is a small dict with ``status``:

    ``done``
        the attempt has a result; the operator reads it.
    ``lost``
        no heartbeat, and the launcher finds no supervisor: the operator asks for another.
    ``tracked``
        the MLflow run is known now; the operator shows the link and waits again.
    ``failed``
        the job cannot be watched (``message`` says why).

    :param mxdist_conn_id: the connection with the keys to the run store.
    :param runs_uri: the run store that the job lives in.
    :param job_key: the job.
    :param attempt: its attempt.
    :param poll_s: seconds between two looks.
    :param stale_after_s: seconds without a heartbeat until the launcher is asked.
    :param await_run: fire ``tracked`` as soon as the MLflow run is known.
    :param chunk: log chunks that an earlier trigger of this task has shown.
    :param line: log lines that an earlier trigger of this task has shown.
    """

    def __init__(
        self,
        *,
        mxdist_conn_id: str,
        runs_uri: str,
        job_key: str,
        attempt: int,
        poll_s: float = 2.0,
        stale_after_s: float = 10.0,
        await_run: bool = False,
        chunk: int = 0,
        line: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mxdist_conn_id = mxdist_conn_id
        self.runs_uri = runs_uri
        self.job_key = job_key
        self.attempt = attempt
        self.poll_s = poll_s
        self.stale_after_s = stale_after_s
        self.await_run = await_run
        self.chunk = chunk
        self.line = line

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments: JSON scalars only, and no secret."""
        return (
            "mxdist.triggers.job.JobTrigger",
            {
                "mxdist_conn_id": self.mxdist_conn_id,
                "runs_uri": self.runs_uri,
                "job_key": self.job_key,
                "attempt": self.attempt,
                "poll_s": self.poll_s,
                "stale_after_s": self.stale_after_s,
                "await_run": self.await_run,
                "chunk": self.chunk,
                "line": self.line,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield the one event."""
        try:
            event = await self._follow()
        except (MxdistError, AirflowNotFoundException) as error:
            event = {"status": "failed", "message": str(error)[:1000]}
        yield TriggerEvent({"attempt": self.attempt, **event})  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """End the job: somebody marked or cleared the task, or deleted its run.

        Airflow also calls this in a triggerer that was silent for so long that another took the trigger over. Then
        the task still waits, or has been resumed, and its job must go on. After a clear, a new try in these states
        ends the old attempt itself (see ``operators/life.py``).

        The intent is written before anything else is waited for: whatever happens then, the job's supervisor acts on
        it, or ``mxdist reconcile`` does.
        """
        give_up = time.monotonic() + _KILL_S
        wished = await _undisturbed(asyncio.wait_for(self._wish(), _KILL_S))
        if wished is None:
            return
        client, attempt = wished
        left_s = give_up - time.monotonic()
        cancel = partial(client.cancel, attempt, by="user", reason=_ENDED, wait_s=left_s / 2)
        try:
            result = await asyncio.wait_for(asyncio.to_thread(cancel), left_s)
        except TimeoutError:
            self.log.warning("Job %s, attempt %d, has not ended yet; it was told to.", self.job_key, self.attempt)
        else:
            self.log.info("Job %s, attempt %d: %s", self.job_key, self.attempt, result.state.value)

    async def _wish(self) -> tuple[JobClient, Attempt] | None:
        """Write the cancel intent; None if the task still wants its job."""
        state = await self._task_state()
        if state in _STILL_WANTED:
            self.log.info("The task is %s and looks after job %s itself: it goes on.", state, self.job_key)
            return None
        hook = await self._hook()
        client = await self._reach(hook)
        attempt = await self._retry(lambda: self._intend(client, state == "success"))
        with contextlib.suppress(AirflowNotFoundException):  # the wish is there, and its supervisor acts on it
            await hook.prefetch_platform(attempt)
        return client, attempt

    async def _follow(self) -> dict[str, Any]:
        hook = await self._hook()
        client = await self._reach(hook)
        watch = await self._retry(lambda: self._open_watch(client))
        await hook.prefetch_platform(watch.attempt)
        pulse, progress = Pulse(self.stale_after_s), ProgressLine()
        watching = f"trigger-{self.trigger_id}-awaits-{'run' if self.await_run else 'end'}"
        while True:
            look = await self._retry(watch.look)
            await self._show(look, progress)
            event = await self._event_of(look, watch, client, pulse)
            if event is not None:
                return event
            if watching:
                await asyncio.to_thread(reach, self.job_key, watching)
                watching = ""
            await asyncio.sleep(0 if look.more else self.poll_s)

    async def _event_of(self, look: Look, watch: Watch, client: JobClient, pulse: Pulse) -> dict[str, Any] | None:
        place = {"chunk": watch.cursor.chunk, "line": watch.cursor.line}
        if look.result is not None:
            return {"status": "done", "state": look.result.state.value}
        if self.await_run and look.state.mlflow_run_url:
            return {"status": "tracked", **place}
        if _overdue(watch):
            await self._ask_platform(
                lambda: client.cancel(watch.attempt, by="deadline", reason="the deadline has passed")
            )
            return None
        if not pulse.stale(look.state.heartbeat, now=time.monotonic()):
            return None
        if await self._ask_platform(lambda: client.launcher.life(watch.attempt)) in (Life.ALIVE, None):
            pulse.reset(now=time.monotonic())
            return None
        return {"status": "lost", **place}

    async def _show(self, look: Look, progress: ProgressLine) -> None:
        for start in range(0, len(look.lines), _LINES_AT_ONCE):
            for number, text in look.lines[start : start + _LINES_AT_ONCE]:
                self.log.info("%6d %s", number, text)
            await asyncio.sleep(0)
        if line := progress.of(look.state, now=time.monotonic()):
            self.log.info("%s", line)

    def _open_watch(self, client: JobClient) -> Watch:
        attempt = JobRun(client.runs, self.job_key).attempt(self.attempt)
        return Watch(attempt, Cursor(self.chunk, self.line))

    async def _reach(self, hook: ClusterHook) -> JobClient:
        return await asyncio.to_thread(hook.job_client, self.runs_uri)

    async def _hook(self) -> ClusterHook:
        hook = ClusterHook(self.mxdist_conn_id)
        await hook.prefetch()
        return hook

    async def _retry(self, work: Callable[[], T]) -> T:
        """Do blocking work in a thread, again and again while the store is out of reach: the job is not."""
        failures = 0
        while True:
            try:
                return await asyncio.to_thread(work)
            except StoreError as error:
                if not error.retryable:
                    raise
                if failures % 10 == 0:
                    self.log.warning("Still waiting for job %s, but: %s", self.job_key, error)
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1

    async def _ask_platform(self, work: Callable[[], T]) -> T | None:
        """Ask something of the platform; None if it does not answer now: that says nothing of the job."""
        try:
            return await self._retry(work)
        except LaunchError as error:
            if not error.retryable:
                raise
            self.log.warning("Still waiting for job %s, but: %s", self.job_key, error)
            return None

    def _intend(self, client: JobClient, marked_success: bool) -> Attempt:
        attempt = JobRun(client.runs, self.job_key).attempt(self.attempt)
        if attempt.result() is None:
            attempt.request_cancel("user", _MARKED if marked_success else _ENDED, marked_success=marked_success)
        return attempt

    async def _task_state(self) -> str | None:
        """Return the task's state now, or None when it has none (cleared, deleted) or nobody can say."""
        for left in reversed(range(_STATE_TRIES)):
            try:
                return await asyncio.wait_for(asyncio.to_thread(self._ask), _STATE_TIMEOUT_S)
            except Exception as error:  # whatever it is, the user asked for the job's end
                self.log.warning("Cannot ask for the task's state: %s", str(error) or type(error).__name__)
            if left:
                await asyncio.sleep(_STATE_PAUSE_S)
        return None

    def _ask(self) -> str | None:
        task = self.task_instance
        if task is None:
            return None
        from mxdist.triggers.asking import task_state

        return task_state(task.dag_id, task.run_id, task.task_id, task.map_index)


async def _undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, however often this task is cancelled meanwhile.

    Airflow's triggerer cancels a trigger anew at every round, each second or so, until its ``on_kill`` has returned.
    """
    task = asyncio.ensure_future(work)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise


def _overdue(watch: Watch) -> bool:
    claim = watch.attempt.claim
    if claim.deadline_at is None:
        return False
    grace_s = float(claim.job.get("limits", {}).get("grace_s", 0))
    return time.time() > claim.deadline_at + grace_s + _DEADLINE_SLACK_S
