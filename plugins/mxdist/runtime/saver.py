"""Checkpoints are written in the background: a slow or absent run store must not hold a training up, nor end it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from mxdist.errors import MxdistError, StoreError
from mxdist.runtime.checkpoint import Arrays, Checkpoints

log = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 15.0


class Saver:
    """Writes snapshots one at a time, on a thread of its own; of those that wait, only the newest counts.

    :param checkpoints: where they go.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._change = threading.Condition()
        self._waiting: tuple[Arrays, Mapping[str, Any], int] | None = None
        self._busy = self._closed = False
        self._error: MxdistError | None = None
        self.published = 0
        self._thread = threading.Thread(target=self._work, name="mxdist-checkpoints", daemon=True)
        self._thread.start()

    def save(self, arrays: Arrays, values: Mapping[str, Any], *, step: int) -> None:
        """Hand over a snapshot, which must not change any more.

        :raises Fenced: an earlier save found that a newer attempt owns the job.
        """
        with self._change:
            self._raise()
            self._waiting = (arrays, values, step)
            self._change.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is published; return False if the time was not enough.

        :raises Fenced: a newer attempt owns the job.
        """
        with self._change:
            done = self._change.wait_for(lambda: self._error or not (self._waiting or self._busy), timeout_s)
            self._raise()
            return bool(done)

    def close(self) -> None:
        """End the thread after what it is doing; what waits is dropped."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        wait_s = _FIRST_WAIT_S
        while (snapshot := self._take()) is not None:
            arrays, values, step = snapshot
            try:
                self._checkpoints.save(arrays, values, step=step)
                self.published, wait_s = step, _FIRST_WAIT_S
                self._done()
            except StoreError as error:
                if not error.retryable:
                    return self._fail(error)
                log.warning("the checkpoint of step %d waits: %s", step, error)
                self._again(snapshot)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            except MxdistError as error:
                return self._fail(error)
            except Exception as error:
                log.exception("the checkpoint of step %d failed", step)
                return self._fail(MxdistError(f"the checkpoint of step {step} failed: {error}"))

    def _take(self) -> tuple[Arrays, Mapping[str, Any], int] | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            snapshot, self._waiting, self._busy = self._waiting, None, True
            return snapshot

    def _again(self, snapshot: tuple[Arrays, Mapping[str, Any], int]) -> None:
        with self._change:
            self._waiting = self._waiting or snapshot
            self._busy = False

    def _done(self) -> None:
        with self._change:
            self._busy = False
            self._change.notify_all()

    def _fail(self, error: MxdistError) -> None:
        with self._change:
            self._error, self._busy = error, False
            self._change.notify_all()
