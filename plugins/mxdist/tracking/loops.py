"""Background work that never gives up, never raises and can be hurried."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from mxdist.errors import Fenced, MxdistError

log = logging.getLogger(__name__)

_FASTEST_S, _SLOWEST_S = 1.0, 15.0
_RETRY_S = (0.5, 1, 2, 4, 8, 15, 30)
_HURRY_S, _HURRY_RETRY_S = 0.05, 0.5


class Loop(threading.Thread, ABC):
    """A thread that takes one step after another; a step that fails is taken again, later and later.

    Steps come every second at first and every 15 seconds in a long training, so that a day's journal is not a
    hundred thousand small objects.

    :param what: names the work in the log.
    :ivar trouble: what the last step failed of; empty: it did not.
    """

    def __init__(self, what: str) -> None:
        super().__init__(name=f"mxdist {what}", daemon=True)
        self._what = what
        self._changed = threading.Condition()
        self._hurried = 0
        self._stopped = False
        self._failures = self._steps = 0
        self._refused = False
        self._began = time.monotonic()
        self.over = False
        self.trouble = ""

    @abstractmethod
    def step(self) -> None:
        """Do what there is to do; set ``over`` when nothing will come any more."""

    def run(self) -> None:
        """Take steps until the work is over or stopped."""
        while not self._stopped and not self.over:
            delay_s = self._guarded()
            with self._changed:
                self._changed.notify_all()
                if not self._stopped and not self.over:
                    self._changed.wait(self._delay(delay_s))

    def wait(self, condition: Callable[[], bool], give_up: float) -> bool:
        """Hurry, and wait for a condition until the monotonic clock says ``give_up``; return whether it holds.

        A step that is refused for good ends the wait early, if it began after the wait did: what was refused
        before may have been put right since.
        """
        with self._changed:
            self._hurried += 1
            self._changed.notify_all()
            now = self._steps
            try:
                self._changed.wait_for(
                    lambda: condition() or (self._refused and self._steps > now), max(0.0, give_up - time.monotonic())
                )
                return condition()
            finally:
                self._hurried -= 1

    def announce(self) -> None:
        """Let those who wait look at their conditions."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Take no further step; a step under way is left to end by itself."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _delay(self, delay_s: float) -> float:
        if not self._hurried:
            return delay_s
        return min(delay_s, _HURRY_RETRY_S if self._failures else _HURRY_S)

    def _guarded(self) -> float:
        self._refused = False
        self._steps += 1
        try:
            self.step()
        except Fenced as error:
            log.warning("%s stops: %s", self._what, error)
            self.over = True
        except Exception as error:  # whatever it is, the training does not end for it
            self._failed(error)
            return _RETRY_S[min(self._failures, len(_RETRY_S)) - 1]
        else:
            self._worked()
        return max(_FASTEST_S, min(_SLOWEST_S, (time.monotonic() - self._began) / 100))

    def _failed(self, error: Exception) -> None:
        self._refused = isinstance(error, MxdistError) and not error.retryable
        if not self._failures:
            trace = not isinstance(error, MxdistError)
            then = "tried again, in case that is put right" if self._refused else "tried again until it works"
            log.warning("%s: %s It is %s.", self._what, error, then, exc_info=trace)
        self._failures += 1
        self.trouble = " ".join(str(error).split()) or type(error).__name__

    def _worked(self) -> None:
        if self._failures:
            log.info("%s works again", self._what)
        self._failures, self.trouble = 0, ""
