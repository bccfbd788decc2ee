"""Row ``recover``: from a killed rank to the next step, over the time from a submission to its first step.

``python bench/recover.py [--pairs N]``, or ``make bench ROW=recover``. One job of two ranks trains LeNet on this
machine; the barriers of its loop (``mxdist/barriers.py``) tell when each step was made, and hold all ranks at one step
until one of them is killed. Both times are of the same job.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("plugins", "scripts", "tests")]

import numpy as np  # noqa: E402

from mxdist.barriers import FOLDER_NAME  # noqa: E402
from mxdist.data.stage import stage  # noqa: E402
from mxdist.launch import JobClient  # noqa: E402
from mxdist.launch.local import LocalLauncher  # noqa: E402
from mxdist.spec import TrainingJob, parse_job  # noqa: E402
from mxdist.store import open_store  # noqa: E402
from support.places import node_python  # noqa: E402

T = TypeVar("T")

GOAL = 1.2
RANKS, SAVED_EVERY, KILLED_AT, STEPS = 2, 5, 22, 40
_BOUND_S = 180.0
_LOOK_S = 0.01


def main() -> int:
    """Measure, print each pair and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    print(f"recover: a killed rank to the next step, over a submission to the first step, {RANKS} ranks", flush=True)
    ratios = []
    for pair in range(options.pairs + 1):
        with tempfile.TemporaryDirectory(prefix="mxdist-bench-") as scratch:
            start_s, recover_s = measure(Path(scratch))
        counts = "warm-up, not counted" if pair == 0 else f"pair {pair}"
        ratio = recover_s / start_s
        print(f"  {counts}: start {start_s:.2f} s, recovery {recover_s:.2f} s, ratio {ratio:.3f}", flush=True)
        if pair:
            ratios.append(ratio)
    ratio = statistics.median(ratios)
    print(f"  median {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} pairs")
    print(json.dumps({"row": "recover", "ratio": round(ratio, 3), "goal": GOAL, "ok": ratio <= GOAL}))
    return 0 if ratio <= GOAL else 1


def measure(scratch: Path) -> tuple[float, float]:
    """Return the seconds of a first start, and those of a recovery."""
    barriers = scratch / "barriers"
    barriers.mkdir()
    os.environ[FOLDER_NAME] = str(barriers)
    for rank in range(RANKS):
        (barriers / f"job.step-{KILLED_AT}-rank-{rank}.hold").touch()
    job, runs = _job(scratch), open_store(str(scratch / "runs"))
    client = JobClient(runs, LocalLauncher(python=str(node_python()), workdir=str(scratch / "work")))
    began = time.time()
    attempt = client.submit(job, "job").attempt
    try:
        start_s = wait_for(lambda: _worlds(barriers, 1), "the first step")[0] - began
        wait_for(lambda: len(_pids(barriers / f"job.step-{KILLED_AT}-rank-1.reached")) == 1, "the barrier")
        wait_for(lambda: len(_pids(barriers / f"job.step-{KILLED_AT}-rank-0.reached")) == 1, "the barrier")
        for hold in barriers.glob("*.hold"):
            hold.unlink()
        killed_at = time.time()
        os.kill(_pids(barriers / f"job.step-{KILLED_AT}-rank-1.reached")[0], signal.SIGKILL)
        recover_s = wait_for(lambda: _worlds(barriers, 2), "the next step")[1] - killed_at
        result = wait_for(attempt.result, "the result")
        if (result.state.name, result.restarts) != ("SUCCEEDED", 1):
            raise SystemExit(f"the job ended as {result.state.name} after {result.restarts} restarts")
    finally:
        client.cancel(attempt, by="user", reason="over")
    return start_s, recover_s


def _job(scratch: Path) -> TrainingJob:
    chance = np.random.default_rng(0)
    folder = scratch / "digits/train"
    folder.mkdir(parents=True)
    np.save(folder / "x.npy", chance.integers(0, 256, (STEPS * 64, 1, 28, 28), dtype=np.uint8))
    np.save(folder / "y.npy", chance.integers(0, 10, STEPS * 64))
    staged = stage(str(folder.parent), str(scratch / "data"), "digits")
    job = parse_job({
        "name": "recover", "model": {"name": "lenet"}, "epochs": 1, "batch_size": 64,
        "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]},
        "parallelism": {"world_size": RANKS}, "checkpoints": {"every_steps": SAVED_EVERY},
    })  # fmt: skip
    assert isinstance(job, TrainingJob)
    return job


def _worlds(barriers: Path, count: int) -> list[float]:
    """Return when each world made its first step, once there are so many; empty before."""
    seen: dict[int, float] = {}
    for path in barriers.glob("job.step-*-rank-0.reached"):
        for order, pid in enumerate(_pids(path)):
            if order == len(_pids(path)) - 1:  # the file's time is that of its last line
                seen[pid] = min(seen.get(pid, float("inf")), path.stat().st_mtime)
    return sorted(seen.values()) if len(seen) >= count else []


def _pids(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def wait_for(look: Callable[[], T], what: str) -> T:
    """Return the first true value of ``look``."""
    give_up = time.monotonic() + _BOUND_S
    while not (found := look()):
        if time.monotonic() > give_up:
            raise SystemExit(f"waited {_BOUND_S:g} s in vain for {what}")
        time.sleep(_LOOK_S)
    return found


if __name__ == "__main__":
    sys.exit(main())
