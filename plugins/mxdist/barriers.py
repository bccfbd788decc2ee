"""Named places in a job's life where a test can hold a process, so that faults hit where they are aimed.

Nothing happens unless ``MXDIST_BARRIERS`` names a folder. Then a process that reaches a barrier leaves
``<job key>.<name>.reached`` there (with its pid), and waits for as long as ``<job key>.<name>.hold`` exists.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER_NAME = "MXDIST_BARRIERS"


def reach(job_key: str, name: str) -> None:
    """Tell that this process of a job has come to ``name``, and wait while a test holds it there."""
    folder = os.environ.get(FOLDER_NAME)
    if not folder:
        return
    place = Path(folder) / f"{job_key}.{name}"
    with place.with_name(f"{place.name}.reached").open("a", encoding="utf-8") as reached:
        reached.write(f"{os.getpid()}\n")
    while place.with_name(f"{place.name}.hold").exists():
        time.sleep(0.05)
