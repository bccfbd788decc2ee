"""The sides of row ``kvstore``: two workers, one server and a scheduler, under mxdist's loop or a plain one.

Both get the processes, environment, threads and cores of the same plan. Prints one JSON line: steps, seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import plain_loop
import world

from mxdist.data.stage import stage

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


def main() -> None:
    """Train, and print the time between the warm-up and the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["mxdist", "plain"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="of a worker that this program has started")
    options = parser.parse_args()
    if options.folder:
        return world.rank(options.folder, WARMUP, options.steps)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        document = job_document(folder, options.steps)
        (folder / "job.json").write_text(json.dumps(document))
        told = ["--steps", str(options.steps)]
        plain = [sys.executable, str(HERE / "plain_kvstore.py"), *told, "--warmup", str(WARMUP)]
        ours = [sys.executable, __file__, "mxdist", "--folder", scratch, *told]
        world.start(folder, ours if options.side == "mxdist" else plain, document)


if __name__ == "__main__":
    main()
