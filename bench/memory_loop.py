"""The work of the rows ``memory_*``: a big network through mxdist's own loop, killed, and gone on with.

The first process trains until a checkpoint is published, and is killed. The second goes on from it, proves that it has
the same weights, and trains to the end. Prints one JSON line: what was measured, beside what the plan estimated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mxdist.data.stage import stage
from mxdist.runtime import loop, network
from mxdist.runtime.checkpoint import Checkpoints
from mxdist.runtime.estimate import resident
from mxdist.runtime.parallel import join
from mxdist.runtime.parallel.base import digest_arrays
from mxdist.runtime.worker import Worker
from mxdist.spec import TrainingJob
from mxdist.store import Attempt, JobRun, open_store

STEPS, SAVED_AT = 12, 4
MODELS: dict[str, tuple[str, int]] = {"resnet152": ("resnet152_v1", 2), "bert_base": ("bert_base", 2)}
KEY = "memory"


def job_document(folder: Path, name: str) -> dict[str, Any]:
    """Stage enough examples for the steps, and return the job."""
    model, batch = MODELS[name]
    source = folder / "source" / "train"
    source.mkdir(parents=True)
    rows, generator = STEPS * batch, np.random.RandomState(0)
    if name == "bert_base":
        np.save(source / "x.npy", generator.randint(0, 30522, (rows, 128)).astype(np.int32))
    else:
        np.save(source / "x.npy", generator.randint(0, 256, (rows, 3, 224, 224), dtype=np.uint8))
    np.save(source / "y.npy", np.arange(rows) % 2)
    staged = stage(str(source.parent), str(folder / "data"), "big")
    return {
        "name": "memory",
        "model": {"name": model, "params": {"classes": 10}},
        "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]},
        "optimizer": {"name": "sgd", "learning_rate": 0.0001, "momentum": 0.9},
        "checkpoints": {"every_steps": SAVED_AT},
        "epochs": 1,
        "batch_size": batch,
    }


def rank(folder: Path, number: int) -> None:
    """Train in this process, from the newest checkpoint on; print what it took."""
    attempt = _attempt(folder, number)
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    place = folder / "jobs" / KEY / str(number)
    world = place / "world-1"
    world.mkdir(parents=True)
    (world / "job.json").write_text(json.dumps(attempt.claim.job))
    worker = Worker(
        attempt_dir=place, world_dir=world, runs_uri=str(folder / "runs"), job_key=KEY, attempt=attempt.number
    )
    trainer = loop.Trainer(job, worker, join(1))
    began = time.monotonic()
    trainer._begin()
    resumed_s = time.monotonic() - began
    print(
        json.dumps({"step": trainer.at.step, "weights": digest_arrays(network.arrays(trainer.setup.net))}), flush=True
    )
    trainer._begin = lambda: None  # type: ignore[method-assign]  # has begun
    saver = trainer._checkpoints
    assert saver is not None
    save, saves = saver.save, []

    def timed(*arguments: Any, **named: Any) -> bool:
        since = time.monotonic()
        done: bool = save(*arguments, **named)
        saves.append(time.monotonic() - since)
        return done

    saver.save = timed  # type: ignore[method-assign]
    trainer.run()
    told = {"resume_s": resumed_s, "save_s": max(saves), "peak": resident("VmHWM")}
    print(json.dumps(told), flush=True)
    os._exit(0)


def measure(folder: Path, name: str) -> dict[str, Any]:
    """Train, kill, go on; return all figures."""
    document = job_document(folder, name)
    job = TrainingJob.parse(document)
    (folder / "job.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "mxdist.runtime.estimate", str(folder / "job.json"), str(folder / "cache")]
    expected = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    run = JobRun(open_store(str(folder / "runs")), KEY)
    run.claim(job, after=0)
    command = [sys.executable, __file__, "--folder", str(folder), "--attempt"]
    first = subprocess.Popen([*command, "1"], stdout=subprocess.PIPE)
    while not Checkpoints._steps(run.attempt(1)):
        if first.poll() is not None:
            sys.exit("the first process ended before a checkpoint was there")
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    saved = Checkpoints(run.attempt(1)).newest()
    if saved is None or saved.step >= STEPS:
        sys.exit("the first process was killed too late")
    size = max(path.stat().st_size for path in (folder / "runs").rglob("arrays.npz"))
    weights = digest_of(saved.arrays)
    saved_step = saved.step
    del saved
    run.claim(job, after=1, origin=1)
    lines = subprocess.run([*command, "2"], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    resumed, told = json.loads(lines[0]), json.loads(lines[-1])
    return {
        "same_weights": resumed == {"step": saved_step, "weights": weights},
        "peak": told["peak"],
        "estimated_peak": expected["ranks"][0]["peak"],
        "checkpoint": size,
        "estimated_checkpoint": expected["checkpoint"],
        "save_s": told["save_s"],
        "resume_s": told["resume_s"],
    }


def digest_of(arrays: dict[str, Any]) -> str:
    """Return the digest of a checkpoint's parameters."""
    import mxnet as mx

    prefix = "param/"
    return digest_arrays({k[len(prefix) :]: mx.nd.array(v) for k, v in arrays.items() if k.startswith(prefix)})


def _attempt(folder: Path, number: int) -> Attempt:
    return JobRun(open_store(str(folder / "runs")), KEY).attempt(number)


def main() -> None:
    """Measure one network."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--folder", type=Path, help="of a process that this program has started")
    parser.add_argument("--attempt", type=int)
    options = parser.parse_args()
    if options.folder:
        return rank(options.folder, options.attempt)
    with TemporaryDirectory() as scratch:
        print(json.dumps(measure(Path(scratch), options.model)))


if __name__ == "__main__":
    main()
