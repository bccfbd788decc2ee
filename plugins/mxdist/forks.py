"""Threads in a process that forks, such as Airflow's scheduler with its LocalExecutor.

A forked child has the one thread that forked, and every lock as it was at that moment: one that another thread held is
never released there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FORK_WAITS_S = 60.0


class ThreadLock:
    """A reentrant lock among the threads of a process; a forked child begins with a free one. Make it once a module."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock."""
        with self._lock:
            yield

    def _renew(self) -> None:
        self._lock = threading.RLock()


_IMPORTING = ThreadLock()
_waited = threading.local()


@contextmanager
def no_fork() -> Iterator[None]:
    """Let other threads fork only after this. For imports: Python's locks of modules are not renewed in a child."""
    with _IMPORTING.held():
        yield


def _wait() -> None:
    _waited.lock = _IMPORTING._lock
    _waited.mine = _waited.lock.acquire(timeout=_FORK_WAITS_S)


def _go_on() -> None:
    if _waited.mine:
        _waited.lock.release()


os.register_at_fork(before=_wait, after_in_parent=_go_on)
