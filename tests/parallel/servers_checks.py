"""One worker that sends gradients in 2 bits: ``python servers_checks.py FOLDER``; writes ``<rank>.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mxnet as mx
import numpy as np

from mxdist.runtime.parallel import AllReduce
from mxdist.runtime.parallel.servers import Store
from mxdist.spec import Parallelism

THRESHOLD = 0.25
STEPS = 12
SIZE = 40


def gradients(rank: int) -> np.ndarray:
    """Return a worker's gradient of each step: no number is above the threshold. Multiples of 2^-8 add exactly."""
    numbers = np.random.RandomState(rank).randint(-64, 65, (STEPS, SIZE))
    return (numbers / 256).astype(np.float32)


if __name__ == "__main__":
    group = AllReduce()
    store = Store.of(
        group,
        Parallelism.parse({
            "strategy": "parameter_server", "world_size": group.size, "compression": "2bit",
            "compression_threshold": THRESHOLD, "lossy": ["compression"],
        })
    )  # fmt: skip
    keys = store.keep([mx.nd.zeros((SIZE,))])
    received = []
    for gradient in gradients(group.rank):
        array = mx.nd.array(gradient)
        store.push(keys, [array])
        store.pull(keys, [array])
        received.append(array.asnumpy().tolist())
    (Path(sys.argv[1]) / f"{group.rank}.json").write_text(json.dumps(received))
    Store.leave(group)
    group.close()
