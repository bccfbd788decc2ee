"""A folder whose services end with the test run, even when the test run is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.places import REPOSITORY


@contextmanager
def guarded(folder: Path) -> Iterator[Path]:
    """Yield the folder; at the end, or when this process is gone, whatever still runs in it is ended."""
    command = [sys.executable, "-I", "-S", str(REPOSITORY / "scripts/stack/guard.py"), str(folder)]
    # The write end of the pipe is ours alone (Python opens it close-on-exec): it closes when we end, however we end.
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    try:
        yield folder
    finally:
        guard.stdin.close()
        guard.wait(timeout=60)
