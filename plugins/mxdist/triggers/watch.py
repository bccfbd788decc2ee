"""One look after the other at a job's run-store documents. No Airflow here: the trigger runs these in threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from mxdist.errors import NotFound
from mxdist.launch.client import log_lines
from mxdist.store import Attempt, Result, State

CURSOR = "watch.json"
_CHUNKS_AT_ONCE = 20
_PATIENT_S = 60.0


@dataclass(frozen=True)
class Cursor:
    """How much of the log has been shown: all lines up to ``line``, all chunks up to ``chunk``."""

    chunk: int = 0
    line: int = 0


@dataclass(frozen=True)
class Look:
    """What one look found.

    :param lines: new log lines with their numbers.
    :param more: there is more log than one look takes.
    :param result: how the attempt ended; only once ``more`` is False.
    """

    lines: list[tuple[int, str]] = field(default_factory=list)
    more: bool = False
    state: State = field(default_factory=State)
    result: Result | None = None


class Watch:
    """Read an attempt's new log lines, state and result.

    Shown lines are remembered in the run store one look late: when the next look begins, Airflow has written the
    lines of this one to its file. So a watcher that is killed loses no line, and its successor repeats those of
    one look at most.

    :param attempt: what to watch.
    :param start: where an earlier watch of the same task stopped.
    """

    def __init__(self, attempt: Attempt, start: Cursor | None = None) -> None:
        self.attempt = attempt
        self._saved = self._load()
        self.cursor = max(self._saved, start or Cursor(), key=lambda cursor: cursor.line)

    def look(self) -> Look:
        """Return what is new, in bounded memory."""
        # The result is written after the last chunk, so it must be read before the log: what is read then is all.
        result = self.attempt.result()
        state = self.attempt.read_state()
        self._save()  # now: a write would look like a job in the empty folder where a share is not mounted
        lines, more = self._new_lines()
        return Look(lines, more, state, None if more else result)

    def _new_lines(self) -> tuple[list[tuple[int, str]], bool]:
        taken = list(islice(log_lines(self.attempt, after=self.cursor.chunk), _CHUNKS_AT_ONCE))
        lines = [line for _, chunk in taken for line in chunk if line[0] > self.cursor.line]
        if taken:
            self.cursor = Cursor(taken[-1][0], lines[-1][0] if lines else self.cursor.line)
        return lines, len(taken) == _CHUNKS_AT_ONCE

    def _save(self) -> None:
        if self.cursor != self._saved:
            self.attempt.store.write_json(CURSOR, {"chunk": self.cursor.chunk, "line": self.cursor.line})
            self._saved = self.cursor

    def _load(self) -> Cursor:
        try:
            saved = self.attempt.store.read_json(CURSOR)
        except NotFound:
            return Cursor()
        return Cursor(saved["chunk"], saved["line"])


class Pulse:
    """Notice a heartbeat that stopped. Only changes count: the job's clock and ours may differ.

    :param stale_after_s: without a change for so long, the job may be dead. A job found alive all the same, as one in a
        queue is, is left alone for twice as long each time, up to a minute.
    """

    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = self._patience_s = stale_after_s
        self._beat: float | None = None
        self._seen_at = 0.0

    def stale(self, beat: float, *, now: float) -> bool:
        """Return whether ``beat`` has not changed for too long.

        :param now: seconds on a clock that never jumps.
        """
        if beat != self._beat:
            self._beat, self._seen_at, self._patience_s = beat, now, self._stale_after_s
        return now - self._seen_at > self._patience_s

    def reset(self, *, now: float) -> None:
        """Wait again, for longer: somebody looked and found the job alive, or could not tell."""
        self._seen_at = now
        self._patience_s = max(self._stale_after_s, min(2 * self._patience_s, _PATIENT_S))


class ProgressLine:
    """Say how far the job is, when its epoch changed or after a while.

    :param every_s: at least so often while anything changes.
    """

    def __init__(self, every_s: float = 30.0) -> None:
        self._every_s = every_s
        self._epoch = 0
        self._step = 0
        self._said_at = float("-inf")

    def of(self, state: State, *, now: float) -> str | None:
        """Return the line to log, or None when there is nothing new to say."""
        if state.step == self._step or (state.epoch == self._epoch and now - self._said_at < self._every_s):
            return None
        self._epoch, self._step, self._said_at = state.epoch, state.step, now
        return _progress(state)


def _progress(state: State) -> str:
    parts = [f"epoch {state.epoch}/{state.epochs}", f"step {state.step}/{state.steps}"]
    if state.samples_per_s:
        parts.append(f"{state.samples_per_s:.0f} samples/s")
    if state.eta_s is not None:
        parts.append(f"{state.eta_s:.0f} s to go")
    parts += [f"{name} {value:.4g}" for name, value in sorted(state.metrics.items())[:6]]
    return "progress: " + ", ".join(parts)
