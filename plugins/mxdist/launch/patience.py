"""Ask somebody who may be away, and do not wait for long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from mxdist.errors import MxdistError

T = TypeVar("T")

OWN_S = 4.0
"""For what a preflight or a plan finds out by itself."""


def bounded(work: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return what ``work`` returns; if it fails or takes too long, what is told ``otherwise``.

    A store that is away is asked again and again by its client; nobody waits for that here.
    """
    done: queue.SimpleQueue[T] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except MxdistError as error:
            done.put(otherwise(str(error)))

    threading.Thread(target=run, daemon=True).start()
    try:
        return done.get(timeout=OWN_S)
    except queue.Empty:
        return otherwise(f"no answer in {OWN_S:g} s")
