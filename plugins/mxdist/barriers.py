"""Named places in a job's life where a test can hold a process, so that faults hit where they are aimed.

Nothing happens unless ``MXDIST_BARRIERS`` names a folder. Then a process that reaches a barrier leaves
``<name>.reached`` there (with its pid), and waits for as long as ``<name>.hold`` exists.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def reach(name: str) -> None:
    """Tell that this process has come to ``name``, and wait while a test holds it there."""
    folder = os.environ.get("MXDIST_BARRIERS")
    if not folder:
        return
    with (Path(folder) / f"{name}.reached").open("a", encoding="utf-8") as reached:
        reached.write(f"{os.getpid()}\n")
    while (Path(folder) / f"{name}.hold").exists():
        time.sleep(0.05)
