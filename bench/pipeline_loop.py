"""The sides of row ``pipeline``: twelve wide layers, in one stage in this process or in two stages on two ranks.

One stage works on the same micro-batches, one after the other. Prints one JSON line: steps, seconds, and the bubble
that was measured. With ``--devices``, two stages are on two CPU contexts of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from mxdist_loop import Stopwatch

from mxdist.data.stage import stage
from mxdist.launch.plan import build_plan
from mxdist.runtime import loop
from mxdist.runtime.parallel import join
from mxdist.runtime.rendezvous import Rendezvous
from mxdist.spec import TrainingJob, parse_job

WARMUP = 5
WIDTH, LAYERS, BATCH = 1024, 12, 256


def job_document(folder: Path, stages: int, micro_batches: int, steps: int, ranks: int) -> dict[str, Any]:
    """Stage enough examples for one epoch, and return the job."""
    source = folder / "wide" / "train"
    source.mkdir(parents=True)
    rows = (WARMUP + steps) * BATCH
    generator = np.random.RandomState(0)
    np.save(source / "x.npy", generator.standard_normal((rows, WIDTH)).astype(np.float32))
    np.save(source / "y.npy", generator.randint(0, 10, rows))
    staged = stage(str(source.parent), str(folder / "data"), "wide")
    cut: dict[str, Any] = {"strategy": "pipeline", "micro_batches": micro_batches, "cuts": [f"features.{LAYERS // 2}"]}
    across: dict[str, Any] = {"across": "processes", "world_size": ranks} if ranks > 1 else {}
    return {
        "name": "pipeline",
        "model": {"name": "mlp", "params": {"classes": 10, "hidden": WIDTH, "layers": LAYERS}},
        "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]},
        "optimizer": {"name": "sgd", "learning_rate": 0.001},
        "epochs": 1,
        "batch_size": BATCH,
        "parallelism": {**cut, **across} if stages > 1 else {"accumulate": micro_batches},
    }


def rank(folder: Path, steps: int) -> None:
    """Train on this rank; rank 0 prints."""
    job = parse_job(json.loads((folder / "job.json").read_text()))
    assert isinstance(job, TrainingJob)
    number = int(os.environ.get("HOROVOD_RANK", "0"))
    attempt_dir = folder / "jobs" / f"pipeline-{number}" / "1"
    attempt_dir.mkdir(parents=True)
    worker = Stopwatch(WARMUP, steps, attempt_dir)
    worker.rank, worker.world_size, worker.job = number, job.parallelism.world_size, job
    group = join(job.parallelism.world_size)
    outcome = loop.Trainer(job, worker, group).run()
    if number == 0:
        bubble = outcome.result["metrics"].get("pipeline_bubble")
        print(json.dumps({"steps": steps, "seconds": worker.seconds, "bubble": bubble}), flush=True)
    group.close()
    os._exit(0)


def world(folder: Path, command: list[str], document: dict[str, Any]) -> None:
    """Start the ranks as a plan lays them out, each on a core of its own.

    :raises SystemExit: one of them failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    plan = build_plan(
        parse_job(document), "pipeline", runs_uri="", python=sys.executable, workdir=str(folder), cores=cores
    )
    meeting = Rendezvous(len(plan.ranks))
    own = {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting.port)}
    running = []
    for one in plan.ranks:
        pinned = ["taskset", "-c", ",".join(map(str, one.cores))] if one.cores else []
        running.append(subprocess.Popen([*pinned, *command], env={**os.environ, **one.environment, **own}))
    codes = [process.wait() for process in running]
    meeting.close()
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


def main() -> None:
    """Train, and print the time between the warm-up and the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, choices=[1, 2], default=1)
    parser.add_argument("--devices", action="store_true", help="stages on devices of one process")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="of a rank that this program has started")
    options = parser.parse_args()
    if options.folder:
        return rank(options.folder, options.steps)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ranks = 1 if options.devices else options.stages
        document = job_document(folder, options.stages, options.micro_batches, options.steps, ranks)
        (folder / "job.json").write_text(json.dumps(document))
        command = [sys.executable, __file__, "--folder", scratch, "--steps", str(options.steps)]
        if ranks > 1:
            return world(folder, command, document)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
