"""A world of the benchmarks: the processes of a plan, and one rank of mxdist's own loop among them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxdist_loop import Stopwatch

from mxdist.launch.plan import RankPlan, build_plan
from mxdist.launch.roles import PORT_NAME, RolePlan
from mxdist.runtime import loop
from mxdist.runtime.crew import keep_port
from mxdist.runtime.parallel import join
from mxdist.runtime.parallel.servers import Store
from mxdist.runtime.rendezvous import Rendezvous
from mxdist.spec import TrainingJob, parse_job


def start(folder: Path, command: Sequence[str], document: Mapping[str, Any]) -> None:
    """Run a world to its end: ranks, and servers if there are any, each on the cores that a plan gives it.

    :param command: of each rank.
    :raises SystemExit: one of them failed.
    """
    job = parse_job(dict(document))
    cores = sorted(os.sched_getaffinity(0))
    plan = build_plan(job, job.name, runs_uri="", python=sys.executable, workdir=str(folder), cores=cores)
    meeting = Rendezvous(len(plan.ranks))
    with keep_port() as port:
        own = {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting.port)}
        if plan.roles:
            own[PORT_NAME] = str(port.getsockname()[1])
        running = [_start(one, one.command, own) for one in plan.roles]
        running += [_start(one, command, own) for one in plan.ranks]
        codes = [process.wait() for process in running]
    meeting.close()
    if any(codes):
        sys.exit(f"the processes of the world ended with {codes}")


def _start(plan: RankPlan | RolePlan, command: Sequence[str], own: Mapping[str, str]) -> subprocess.Popen[bytes]:
    pinned = ["taskset", "-c", ",".join(map(str, plan.cores))] if plan.cores else []
    return subprocess.Popen([*pinned, *command], env={**os.environ, **plan.environment, **own})


def rank(folder: Path, warmup: int, steps: int) -> None:
    """Train the job of ``folder`` on this rank, and end the process; rank 0 prints one JSON line.

    That has steps, seconds and, of a pipeline, the bubble.
    """
    job = parse_job(json.loads((folder / "job.json").read_text()))
    assert isinstance(job, TrainingJob)
    number = int(os.environ.get("HOROVOD_RANK", "0"))
    attempt_dir = folder / "jobs" / f"{job.name}-{number}" / "1"
    attempt_dir.mkdir(parents=True)
    worker = Stopwatch(warmup, steps, attempt_dir)
    worker.rank, worker.world_size, worker.job = number, job.parallelism.world_size, job
    group = join(job.parallelism.world_size)
    outcome = loop.Trainer(job, worker, group).run()
    if number == 0:
        told = {"steps": steps, "seconds": worker.seconds, "bubble": outcome.result["metrics"].get("pipeline_bubble")}
        print(json.dumps(told), flush=True)
    Store.leave(group)
    group.close()
    os._exit(0)
