"""The sides of row ``pipeline``: twelve wide layers, in one stage in this process or in two stages on two ranks.

One stage works on the same micro-batches, one after the other. Prints one JSON line: steps, seconds, and the bubble
that was measured. With ``--devices``, two stages are on two CPU contexts of one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import world

from mxdist.data.stage import stage

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
        return world.rank(options.folder, WARMUP, options.steps)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ranks = 1 if options.devices else options.stages
        document = job_document(folder, options.stages, options.micro_batches, options.steps, ranks)
        (folder / "job.json").write_text(json.dumps(document))
        command = [sys.executable, __file__, "--folder", scratch, "--steps", str(options.steps)]
        if ranks > 1:
            return world.start(folder, command, document)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
