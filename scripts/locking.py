"""One start or stop at a time in one checkout."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold the lock of a generated folder; say so when another command has it."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another make command in this folder ...", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
