"""The Horovod that is built here: what is mended in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from parallel.worlds import start

HERE = Path(__file__).parent


def test_the_name_of_a_broadcast_outlives_it(tmp_path: Path) -> None:
    """As published, the thread that hands over a broadcast reads its name when that may be freed, and dies of it."""
    preloaded = tmp_path / "late_names.so"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", preloaded, HERE / "late_names.cc", "-ldl"], check=True)
    ranks = [sys.executable, str(HERE / "broadcasts.py")]
    world = start(tmp_path / "ranks", ranks, 2, {"LD_PRELOAD": str(preloaded)})
    assert world.wait() == [0, 0], world.logs()
    for rank in (0, 1):
        assert world.log(rank).count("paused before a name") >= 10, "else the race was not run"
        assert "all arrived" in world.log(rank)
