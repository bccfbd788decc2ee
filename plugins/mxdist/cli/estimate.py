"""``mxdist plan --estimate``: the memory of a job, as the node environment computes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mxdist
from mxdist.errors import MxdistError
from mxdist.launch.plan import Plan, base_environment
from mxdist.spec import Job

_COLUMNS = ("parameters", "gradients", "optimizer", "kept", "working")
_PROCESS = ("elsewhere", "inputs", "exchange", "checkpoint", "base")


def estimate(job: Job, plan: Plan) -> dict[str, Any]:
    """Return the document of ``mxdist.runtime.estimate``; the dataset is fetched into the cache of this host.

    :raises MxdistError: it cannot be estimated, and why.
    """
    cache = Path(plan.attempt_dir).parents[1] / ".datasets"  # of all jobs of this work folder
    environment = base_environment(os.environ) | {k: v for k, v in os.environ.items() if k in plan.secret_names}
    environment |= {"PYTHONPATH": str(Path(mxdist.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory(prefix="mxdist-estimate-") as scratch:
        file = Path(scratch) / "job.json"
        file.write_text(json.dumps(job.to_document()), encoding="utf-8")
        command = [plan.python, "-m", "mxdist.runtime.estimate", str(file), str(cache)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        tail = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MxdistError(f"the node environment could not estimate the memory: {tail}") from None
    if "error" in found:
        print(done.stderr, end="", file=sys.stderr)
        raise MxdistError(found["error"], hint=found["hint"])
    return found


def describe(found: Mapping[str, Any]) -> str:
    """Return the estimate as a table, in MiB."""
    return "\n".join(_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield "memory, estimated, in MiB"
    yield "rank  stage  numbers      " + "".join(f"{name:>12}" for name in (*_COLUMNS, "total"))
    for rank in found["ranks"]:
        for stage in rank["stages"]:
            values = [stage[name] for name in _COLUMNS]
            cells = "".join(f"{_mib(value):>12}" for value in (*values, sum(values)))
            yield f"{rank['rank']:<4}  {stage['stage']:<5}  {stage['count']:<13,}{cells}"
    yield ""
    yield "rank  " + "".join(f"{name:>12}" for name in ("stages", *_PROCESS, "peak"))
    for rank in found["ranks"]:
        stages = sum(stage[name] for stage in rank["stages"] for name in _COLUMNS)
        cells = "".join(f"{_mib(value):>12}" for value in (stages, *(rank[name] for name in _PROCESS), rank["peak"]))
        yield f"{rank['rank']:<4}  {cells}"
    yield ""
    yield f"a checkpoint: {_mib(found['checkpoint'])} MiB"
    yield from (f"note: {note}" for note in found["notes"])


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f}"
