"""One rank of a world that tries what a group can do: ``python group_checks.py FOLDER``; writes ``<rank>.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.errors import CheckpointError, MxdistError
from mxdist.runtime.parallel import AllReduce


def refused(action: Any) -> str:
    """Return what an action raises."""
    try:
        action()
    except MxdistError as error:
        return f"{type(error).__name__}: {error.message}"
    return ""


def fail() -> None:
    """Fail as a checkpoint that cannot be read does."""
    raise CheckpointError("torn", hint="look")


def checks(group: AllReduce) -> dict[str, Any]:
    """Make the same calls on every rank, in the same order; return what came of each."""
    rank, size = group.rank, group.size
    equal, different = mx.nd.array([1.5]), mx.nd.array([1.5 + (rank == size - 1) * 1e-7])
    gradient = [mx.nd.array([rank + 1.0]), mx.nd.array([[10.0 * rank, 1.0]])]
    group.sum_(gradient)
    named = mx.nd.array([rank, 1.0])
    group.sum_named_(named, "checks.named")
    conv = mx.gluon.nn.Conv2D(32, 3, in_channels=32, weight_initializer=mx.init.Constant(rank + 2))
    conv.initialize()
    conv(mx.nd.ones((1, 32, 8, 8))).wait_to_read()  # outside of training, this puts the weight into a layout of oneDNN
    group.broadcast_({"conv": conv.weight.data()})
    with mx.autograd.record():
        loss = conv(mx.nd.ones((1, 32, 8, 8)))
    loss.backward()
    group.sum_([conv.weight.grad()])
    own = mx.nd.array([float(rank)])
    group.broadcast_({"own": own})
    return {
        "large": group.total(np.array([16777217.0 if rank == 0 else 0.0]))[0],
        "third": group.total(np.array([1 / 3 if rank == 0 else 0.0]))[0],
        "gathered": group.gather([rank, -rank]).tolist(),
        # rank 0 has one example and is right; every other rank has 99 and is wrong
        "means": group.means({"accuracy": (1.0, 1) if rank == 0 else (0.0, 99), "nobody": (0.0, 0)})["accuracy"],
        "nobody": bool(np.isnan(group.means({"nobody": (0.0, 0)})["nobody"])),
        "any": [group.any(False), group.any(rank == size - 1)],
        "bytes": [len(group.broadcast_bytes(b"x" * 70_000 if rank == 0 else b"")), len(group.broadcast_bytes(b""))],
        "shared": group.share(lambda: {"from": rank, "none": None}),
        "share_fails": refused(lambda: group.share(fail)),
        "summed": [array.asnumpy().tolist() for array in gradient],
        "named": named.asnumpy().tolist(),
        "reordered": sorted(set(conv.weight.data().asnumpy().ravel().tolist())),
        "convolved": sorted(set(conv.weight.grad().asnumpy().ravel().tolist())),
        "broadcast": float(own.asscalar()),
        "equal": len(group.check_equal({"w": equal}, where="here")),
        "differ": refused(lambda: group.check_equal({"w": different}, where="here")),
    }


if __name__ == "__main__":
    joined = AllReduce()
    found = checks(joined)
    (Path(sys.argv[1]) / f"{joined.rank}.json").write_text(json.dumps(found))
    joined.close()
