"""The sides of row ``kvstore``: two workers, one server and a scheduler, under mxdist's loop or a plain one.

Both get the processes, environment, threads and cores of the same plan. Prints one JSON line: steps, seconds.
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
import plain_loop
from mxdist_loop import Stopwatch

from mxdist.data.stage import stage
from mxdist.launch.plan import RankPlan, build_plan
from mxdist.launch.roles import PORT_NAME, RolePlan
from mxdist.runtime import loop
from mxdist.runtime.parallel import join
from mxdist.runtime.parallel.servers import Store
from mxdist.runtime.rendezvous import Rendezvous
from mxdist.runtime.world import keep_port
from mxdist.spec import TrainingJob, parse_job

HERE = Path(__file__).resolve().parent
WARMUP, BATCH, WORKERS = 20, 64, 2


def job_document(folder: Path, steps: int) -> dict[str, Any]:
    """Stage the images, and return the job."""
    source = folder / "images" / "train"
    source.mkdir(parents=True)
    x, y = plain_loop.images(100 * BATCH)
    np.save(source / "x.npy", x)
    np.save(source / "y.npy", y)
    staged = stage(str(source.parent), str(folder / "data"), "images")
    return {
        "name": "kvstore",
        "model": {"recipe": str(HERE / "cifar_recipe.py"), "params": {"classes": 10}},
        "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]},
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.9},
        "epochs": -(-(WARMUP + steps) // 100),
        "batch_size": BATCH,
        "parallelism": {"strategy": "parameter_server", "world_size": WORKERS},
    }


def rank(folder: Path, steps: int) -> None:
    """Train on this worker; rank 0 prints."""
    job = parse_job(json.loads((folder / "job.json").read_text()))
    assert isinstance(job, TrainingJob)
    number = int(os.environ["HOROVOD_RANK"])
    attempt_dir = folder / "jobs" / f"kvstore-{number}" / "1"
    attempt_dir.mkdir(parents=True)
    worker = Stopwatch(WARMUP, steps, attempt_dir)
    worker.rank, worker.world_size, worker.job = number, WORKERS, job
    group = join(WORKERS)
    loop.Trainer(job, worker, group).run()
    if number == 0:
        print(json.dumps({"steps": steps, "seconds": worker.seconds}), flush=True)
    Store.leave(group)
    group.close()
    os._exit(0)


def world(folder: Path, command: list[str], document: dict[str, Any]) -> None:
    """Start scheduler, server and workers as a plan lays them out.

    :raises SystemExit: one of them failed.
    """
    cores = sorted(os.sched_getaffinity(0))
    plan = build_plan(
        parse_job(document), "kvstore", runs_uri="", python=sys.executable, workdir=str(folder), cores=cores
    )
    meeting = Rendezvous(len(plan.ranks))
    with keep_port() as port:
        own = {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting.port), PORT_NAME: str(port.getsockname()[1])}
        running = [_start(one, list(one.command), own) for one in plan.roles]
        running += [_start(one, command, own) for one in plan.ranks]
        codes = [process.wait() for process in running]
    meeting.close()
    if any(codes):
        sys.exit(f"the processes of the world ended with {codes}")


def _start(plan: RankPlan | RolePlan, command: list[str], own: dict[str, str]) -> subprocess.Popen[bytes]:
    pinned = ["taskset", "-c", ",".join(map(str, plan.cores))] if plan.cores else []
    return subprocess.Popen([*pinned, *command], env={**os.environ, **plan.environment, **own})


def main() -> None:
    """Train, and print the time between the warm-up and the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["mxdist", "plain"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="of a worker that this program has started")
    options = parser.parse_args()
    if options.folder:
        return rank(options.folder, options.steps)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        document = job_document(folder, options.steps)
        (folder / "job.json").write_text(json.dumps(document))
        told = ["--steps", str(options.steps)]
        plain = [sys.executable, str(HERE / "plain_kvstore.py"), *told, "--warmup", str(WARMUP)]
        ours = [sys.executable, __file__, "mxdist", "--folder", scratch, *told]
        world(folder, ours if options.side == "mxdist" else plain, document)


if __name__ == "__main__":
    main()
