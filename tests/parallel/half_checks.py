"""One rank that sums gradients whole and as float16: ``python half_checks.py FOLDER``; writes ``<rank>.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.runtime.parallel import AllReduce
from mxdist.runtime.parallel.half import HalfSum


def errors(group: AllReduce) -> list[float]:
    """Return how far float16 sums are off, over the ranks' norms in sum; three steps of one training."""
    numbers, half, found = np.random.RandomState(group.rank), HalfSum(), []
    shapes = [(64, 32), (32,), (3, 5, 7)]
    gradients = [mx.nd.zeros(shape, dtype="float64") for shape in shapes]
    for scale in (1.0, 0.1, 300.0):
        values = [numbers.standard_normal(shape) * scale for shape in shapes]
        for gradient, value in zip(gradients, values, strict=True):
            gradient[:] = mx.nd.array(value, dtype="float64")
        half.sum_(gradients, group.sum_)
        exact = group.total(np.concatenate([value.ravel() for value in values]))
        norm = np.sqrt(sum((value**2).sum() for value in values))
        rounded = np.concatenate([gradient.asnumpy().ravel() for gradient in gradients])
        found.append(float(np.linalg.norm(rounded - exact) / group.total(np.array([norm]))[0]))
    return found


def overflow(group: AllReduce) -> list[Any]:
    """Return what becomes of 40000, which float16 holds, when two ranks add it, and of 70000, which it does not."""
    array = mx.nd.array([40000.0, 70000.0 * (group.rank == 0), 1.0])
    HalfSum().sum_([array], group.sum_)
    return [str(value) for value in array.asnumpy()]


if __name__ == "__main__":
    joined = AllReduce()
    document = {"errors": errors(joined), "overflow": overflow(joined)}
    (Path(sys.argv[1]) / f"{joined.rank}.json").write_text(json.dumps(document))
    joined.close()
