"""The thread between a supervisor and the run store: state and logs out, cancel intents and newer attempts in.

The supervisor's own thread never waits for the run store, so an outage cannot delay a watchdog or a deadline. While
the store does not answer, the reporter tries again at growing intervals, and nothing is lost: the state is replaced
anyway, and log lines stay in their files.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mxdist.errors import MxdistError
from mxdist.runtime.logs import LogMirror
from mxdist.store import Attempt, CancelIntent, State
from mxdist.store.sequence import numbered

log = logging.getLogger("mxdist.supervisor")

PERIOD_S = 1.0
_LATER_PERIOD_S = 2.0
_YOUNG_S = 60.0  # people watch a job closely in its first minute; later, half the requests are enough
_FENCE_EVERY_S = 5.0
_MAX_BACKOFF_S = 15.0
LOW_PRIORITY = 15
"""As a nice value: of everything that may wait while ranks compute."""


class Reporter:
    """Mirrors one attempt into the run store until it is closed. No method but ``drain`` waits for the store.

    :param incarnation: which supervisor of the attempt this is.
    :param wake: called when there is news: a cancel intent, or a newer attempt or supervisor.
    """

    def __init__(self, attempt: Attempt, folder: Path, *, incarnation: int, wake: Callable[[], None]) -> None:
        self._attempt = attempt
        self._incarnation = incarnation
        self._wake = wake
        self._logs = LogMirror(attempt, folder)  # only the reporter's thread touches it
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: list[threading.Event] = []
        self._resumed = False
        self._state = State()
        self._hurry = threading.Event()
        self._closing = False
        self._began = time.monotonic()
        self._fence_at = 0.0
        self._failing = False
        self.cancel: CancelIntent | None = None
        self.replaced = ""
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Begin to mirror."""
        self._thread.start()

    def show(self, state: State) -> None:
        """Take the state to be written next."""
        self._state = state

    def note(self, text: str) -> None:
        """Add a line of the supervisor's own to the job's log."""
        log.info("%s", text)
        self._orders.put(lambda: self._logs.note(text))

    def world_started(self, number: int, ranks: int) -> None:
        """Turn to the logs of a new world."""
        self._orders.put(lambda: self._logs.follow(number, ranks))
        self._hurry.set()

    def world_ended(self) -> None:
        """Take the end of every log of the world; its ranks are dead."""
        self._orders.put(lambda: self._logs.collect(final=True))
        self._hurry.set()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything handed over so far is in the run store; return whether it is."""
        written = threading.Event()
        self._orders.put(lambda: self._waiting.append(written))
        self._hurry.set()
        return written.wait(timeout_s)

    def close(self) -> None:
        """Stop the thread; what it has not written stays unwritten."""
        self._closing = True
        self._hurry.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        pause_s = 0.0
        while not self._closing:
            self._hurry.wait(pause_s)
            self._hurry.clear()
            pause_s = self._guarded(pause_s)

    def _guarded(self, pause_s: float) -> float:
        """Do one round; return how long to wait before the next."""
        try:
            self._round()
        except Exception as error:  # this thread must not die: it is the one that hears of cancels
            if not self._failing:
                log.warning("trying again: %s", error, exc_info=not isinstance(error, MxdistError))
            self._failing = True
            return min(max(pause_s * 2, 2.0), _MAX_BACKOFF_S)
        if self._failing:
            log.info("the run store answers again")
        self._failing = False
        return PERIOD_S if time.monotonic() - self._began < _YOUNG_S else _LATER_PERIOD_S

    def _round(self) -> None:
        if not self._resumed:
            self._logs.resume()
            self._resumed = True
        while not self._orders.empty():
            self._orders.get()()
        self._logs.collect()
        self._logs.flush()
        state = replace(self._state, heartbeat=time.time(), log_lines=self._logs.line_count)
        self._attempt.write_state(state)
        while self._waiting:
            self._waiting.pop().set()
        self._look()

    def _look(self) -> None:
        if self.cancel is None:
            self.cancel = self._attempt.cancel_intent()
            if self.cancel is not None:
                self._wake()
        if time.monotonic() >= self._fence_at and not self.replaced:
            self._fence_at = time.monotonic() + _FENCE_EVERY_S
            self.replaced = self._replaced()
            if self.replaced:
                self._wake()

    def _replaced(self) -> str:
        number = self._attempt.number
        if self._attempt.job.store.exists(numbered("attempts", number + 1)):
            return f"attempt {number} was replaced by a newer one"
        if self._attempt.store.exists(numbered("supervisors", self._incarnation + 1)):
            return f"supervisor {self._incarnation} was replaced by a newer one"
        return ""
