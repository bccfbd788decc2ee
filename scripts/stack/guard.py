"""Stop every service of some folders as soon as the process that holds our standard input is gone.

Tests start one, so that nothing survives a test run that was killed. Usage: guard.py FOLDER
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from stack.processes import PidFile, Process, end, family, of_jobs


def sweep(root: Path, *, grace_s: float) -> None:
    """End what any pid file under ``root`` names, all its kin, and all jobs with scratch folders there."""

    def victims() -> list[Process]:
        known = [PidFile(path).read() for path in root.rglob("*.pid")]
        return family([item for item in known if item is not None]) + of_jobs(root)

    end(victims, grace_s=grace_s)


def main() -> None:
    """Wait for the end of standard input, then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(InterruptedError):
            if not os.read(0, 4096):
                break
    sweep(Path(sys.argv[1]), grace_s=3)


if __name__ == "__main__":
    main()
