"""Whether each row of a batch stands alone: only then may a batch be computed in parts.

Gluon's own BatchNorm layers are known, and what becomes of their statistics is settled elsewhere
(``normalisation``). Here everything else is looked at: operators in the graph that are batch normalisations without
being such a layer, and whatever makes the loss of a row depend on the rows beside it, which is tried out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import mxnet as mx
import numpy as np
from mxnet import autograd

from mxdist.runtime import network

_NORMALISES = {"BatchNorm", "BatchNorm_v1", "SyncBatchNorm", "_contrib_SyncBatchNorm", "_contrib_BatchNormWithReLU"}
_OFF = {"float64": 1e-9, "float32": 1e-3}  # of the largest loss: rows alone are rounded in another order


def row_mixers(forward: network.Forward, loss: mx.gluon.HybridBlock, x: mx.nd.NDArray, y: mx.nd.NDArray) -> str:
    """Return what lets rows influence each other while training, in words; "" if nothing does.

    :param x: a few different rows of stored inputs.
    :param y: their targets.
    """
    with _settled(forward):
        graph = loss(forward(mx.sym.var("data")), mx.sym.var("target"))
        nodes = json.loads(graph.tojson())["nodes"]
        names = [node["name"] for node in nodes if _takes_batch_statistics(node)]
        if names:
            return f"batch statistics of {', '.join(names[:3])}"
        if len(x) < 2 or network.random_ops(graph):
            return ""
        with autograd.train_mode():
            together = loss(forward(x), y).asnumpy()
            alone = [loss(forward(x[row : row + 1]), y[row : row + 1]).asnumpy() for row in range(len(x))]
    apart = np.abs(together - np.concatenate(alone)).max()
    allowed = _OFF[together.dtype.name] * max(1.0, float(np.abs(together).max()))
    return "" if not apart > allowed else f"the loss of a row is off by {apart:.2g} when it is computed alone"


def _takes_batch_statistics(node: dict[str, object]) -> bool:
    attributes = node.get("attrs", {})
    settled = isinstance(attributes, dict) and attributes.get("use_global_stats") in ("True", "1")
    return node["op"] in _NORMALISES and not settled


@contextmanager
def _settled(net: mx.gluon.Block) -> Iterator[None]:
    """Let Gluon's own batch normalisations use running statistics for a while."""
    known = [layer for _, layer in network.layers(net) if network.is_batch_norm(layer)]
    before = [layer._kwargs["use_global_stats"] for layer in known]
    try:
        for layer in known:
            layer._kwargs["use_global_stats"] = True
        yield
    finally:
        for layer, value in zip(known, before, strict=True):
            layer._kwargs["use_global_stats"] = value
