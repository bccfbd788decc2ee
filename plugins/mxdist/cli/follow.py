"""Follow a job: its log as it grows, its progress, its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TextIO

from mxdist.errors import LaunchError, StoreError
from mxdist.launch import JobClient, Life
from mxdist.launch.client import log_lines, waits_too_long
from mxdist.spec import JobState
from mxdist.store import Attempt, Result, State

_FASTEST_S, _SLOWEST_S = 0.3, 2.0
_STALE_S = 10.0
_ASK_S, _ASK_SELDOM_S = 2.0, 30.0
_PROGRESS_EVERY_S = 2.0


@dataclass
class Follower:
    """Prints what is new of one attempt.

    :param revive: called when the supervisor is dead and no result is there; None only looks on.
    """

    client: JobClient
    attempt: Attempt
    revive: Callable[[], None] | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    progress: TextIO | None = field(default_factory=lambda: sys.stderr)
    _chunk: int = 0
    _line: int = 0
    _told: str = ""
    _told_at: float = 0.0
    _ask_at: float = 0.0
    _ask_pause_s: float = _ASK_S

    def until_end(self) -> Result:
        """Print log and progress until the attempt has ended, and return its result.

        The run store may be away for a while: the job goes on, and so does this.
        """
        pause_s, away = _FASTEST_S, False
        while True:
            try:
                result = self.attempt.result()
                moved = self.print_new()
                if result is not None:
                    return result
                self._look()
            except StoreError as error:
                if not error.retryable:
                    raise
                if not away:
                    self._tell_of(error)
                away, moved = True, False
            else:
                away = False
            pause_s = _FASTEST_S if moved else min(pause_s * 1.4, _SLOWEST_S)
            time.sleep(pause_s)

    def print_new(self) -> bool:
        """Print the lines that are new; return whether there were any."""
        moved = False
        for number, lines in log_lines(self.attempt, after=self._chunk):
            for place, line in lines:
                if place > self._line:  # Ctrl-C may have come in the middle of a chunk
                    print(line, file=self.out)
                    self._line = place
            self._chunk, moved = number, True
        self.out.flush()
        return moved

    def _look(self) -> None:
        state = self.attempt.read_state()
        if self.revive is not None and time.time() - state.heartbeat > _STALE_S:
            self._see_to_it(self.revive)
        else:
            self._ask_at, self._ask_pause_s = 0.0, _ASK_S
        text = describe_progress(state)
        if self.progress is None or text == self._told or time.monotonic() - self._told_at < _PROGRESS_EVERY_S:
            return
        self._told, self._told_at = text, time.monotonic()
        print(text, file=self.progress, flush=True)

    def _see_to_it(self, revive: Callable[[], None]) -> None:
        """Ask the platform whether the supervisor lives. A job in a queue has no heartbeat: it is asked more seldom."""
        if time.monotonic() < self._ask_at:
            return
        try:
            life = self.client.launcher.life(self.attempt)
        except LaunchError as error:
            if not error.retryable:
                raise
            self._tell_of(error)  # a platform that does not answer now says nothing of the job
            life = Life.ALIVE
        if life is not Life.ALIVE or waits_too_long(self.attempt):
            revive()
        self._ask_at = time.monotonic() + self._ask_pause_s
        self._ask_pause_s = min(2 * self._ask_pause_s, _ASK_SELDOM_S)

    def _tell_of(self, error: Exception) -> None:
        print(f"mxdist: {error} Trying again; the job is not affected.", file=sys.stderr)


def describe_progress(state: State) -> str:
    """Return one line: epoch, step, metrics, speed, time left."""
    return " | ".join(_progress_parts(state))


def _progress_parts(state: State) -> Iterator[str]:
    yield state.state.value.lower() + (f" (restart {state.world - 1})" if state.world > 1 else "")
    if state.epochs:
        yield f"epoch {state.epoch}/{state.epochs}"
    if state.step:
        yield f"step {state.step}/{state.steps}" if state.steps else f"step {state.step}"
    for name, value in sorted(state.metrics.items()):
        yield f"{name} {value:.4g}"
    if state.samples_per_s:
        yield f"{state.samples_per_s:,.0f} samples/s"
    if state.eta_s is not None:
        yield f"{_duration(state.eta_s)} left"


def told_since(attempt: Attempt, result: Result) -> Result:
    """Return the result with what happened after it was written.

    ``mxdist reconcile`` or an operator may have told MLflow the rest, and a preempted job may have been given up.

    :raises StoreError: the run store cannot be reached.
    """
    from mxdist.tracking.delivery import Progress
    from mxdist.tracking.replay import last_word

    result = last_word(attempt, result)
    if result.tracking_complete:
        return result
    progress = Progress.read(attempt)
    return replace(
        result,
        mlflow_run_id=result.mlflow_run_id or progress.run_id,
        mlflow_run_url=result.mlflow_run_url or progress.run_url,
        registered_version=result.registered_version or progress.registered_version,
        tracking_complete=progress.complete,
        tracking_error=None if progress.complete else result.tracking_error,
    )


def describe_result(attempt: Attempt, result: Result) -> str:
    """Return how the attempt ended, as lines of names and values."""
    result = told_since(attempt, result)
    why = f": {result.tracking_error}" if result.tracking_error else ""
    rows = {
        "job": f"{attempt.claim.job_key}, attempt {attempt.number}",
        "state": result.state.value,
        "cause": f"{result.cause.kind}: {result.cause.message}" if result.cause else None,
        "metrics": ", ".join(f"{name} {value:.6g}" for name, value in sorted(result.metrics.items())) or None,
        "duration": _duration(result.duration_s),
        "restarts": str(result.restarts) if result.restarts else None,
        "model": result.model_uri,
        "registered": f"version {result.registered_version}" if result.registered_version else None,
        "mlflow": result.mlflow_run_url,
        "tracking": None if result.tracking_complete else f"incomplete{why}; `mxdist reconcile` sends the rest",
    }
    return "\n".join(f"{name:<11} {value}" for name, value in rows.items() if value)


def exit_code(state: JobState) -> int:
    """Return what the command line ends with: as the errors of ``mxdist.errors`` do."""
    return {
        JobState.SUCCEEDED: 0,
        JobState.DEADLINE: 9,
        JobState.CANCELLED: 130,
        JobState.PREEMPTED: 75,  # EX_TEMPFAIL: the same command again goes on from the checkpoint
    }.get(state, 8)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
