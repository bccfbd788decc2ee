"""Our side of row ``loop``: the same network, images and optimizer through mxdist's own loop.

Losses are recorded in a journal, as in a job. Prints one JSON line: steps, seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import mxnet as mx
import numpy as np
import plain_loop

from mxdist.data.stage import stage
from mxdist.runtime import loop
from mxdist.runtime.parallel import Alone
from mxdist.runtime.worker import Worker
from mxdist.spec import TrainingJob

HERE = Path(__file__).resolve().parent


class Stopwatch(Worker):
    """A worker that notes when the warm-up ends, and when all steps are done."""

    def __init__(self, warmup: int, steps: int, folder: Path) -> None:
        super().__init__(attempt_dir=folder)
        self._first, self._last = warmup, warmup + steps
        self.started = self.seconds = 0.0

    def beat(self, step: int) -> None:
        """Note the time, once all that was asked of MXNet's engine is done."""
        if step == self._first and not self.started:
            mx.nd.waitall()
            self.started = time.monotonic()
        elif step == self._last and not self.seconds:
            mx.nd.waitall()
            self.seconds = time.monotonic() - self.started
        super().beat(step)


def main() -> None:
    """Stage the images, train, print the time between the warm-up and the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        source = Path(scratch) / "images" / "train"
        source.mkdir(parents=True)
        x, y = plain_loop.images(100 * options.batch_size)
        np.save(source / "x.npy", x)
        np.save(source / "y.npy", y)
        staged = stage(str(source.parent), f"{scratch}/data", "images")
        job = TrainingJob.parse(
            {
                "name": "loop",
                "model": {"recipe": str(HERE / "cifar_recipe.py"), "params": {"classes": 10}},
                "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]},
                "optimizer": {"name": "adam", "learning_rate": 0.001},
                "epochs": -(-(options.warmup + options.steps) // 100),
                "batch_size": options.batch_size,
            }
        )
        attempt_dir = Path(scratch) / "jobs" / "loop" / "1"
        attempt_dir.mkdir(parents=True)
        worker = Stopwatch(options.warmup, options.steps, attempt_dir)
        loop.Trainer(job, worker, Alone()).run()
        print(json.dumps({"steps": options.steps, "seconds": worker.seconds}))


if __name__ == "__main__":
    main()
