"""Whether a script's ranks, each with its share of a batch, have the gradient that one process has of all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from mxdist.runtime import judging, network
from mxdist.runtime.parallel import AllReduce, Group

Loss = Callable[[mx.nd.NDArray, mx.nd.NDArray], mx.nd.NDArray]
_HINT = (
    "Do all ranks start from rank 0's weights? Are their shares of equal size? BatchNorm takes its statistics from one "
    "rank's rows, and Dropout draws others on every rank: give it rate 0 for this check."
)


def check(
    net: mx.gluon.Block,
    loss: Loss,
    batch: tuple[mx.nd.NDArray, mx.nd.NDArray],
    *,
    reduce: Callable[[], None] | None = None,
) -> float:
    """Compare the ranks' gradient with one process's; every rank must call it. See ``Worker.verify``."""
    group, x, y = AllReduce(), *batch
    with _as_before(net):
        _backward(net, loss, x, y)
        if reduce is None:
            _average(net, group)
        else:
            reduce()
        found = _gradients(net)
    rows, labels = (_all_rows(array, name) for name, array in (("x", x), ("y", y)))
    with _as_before(net):
        if group.rank == 0:
            _backward(net, loss, rows, labels)
        wanted = {name: mx.nd.array(value, dtype=value.dtype) for name, value in _gradients(net).items()}
    group.broadcast_(wanted)
    return _judge(found, {name: array.asnumpy() for name, array in wanted.items()}, group)


def _judge(found: dict[str, Any], wanted: dict[str, Any], group: Group) -> float:
    exact = all(array.dtype == np.float64 for array in wanted.values())
    bounds = judging.EXACT if exact else judging.FLOAT32
    what = "the ranks do not train as one process does: the gradient"
    own = judging.gradients(found, wanted, bounds)
    return judging.judge(own, bounds.gradient, list(wanted), group, what=what, hint=_HINT)


def _backward(net: mx.gluon.Block, loss: Loss, x: mx.nd.NDArray, y: mx.nd.NDArray) -> None:
    for parameter in network.trainable(net).values():
        parameter.zero_grad()
    with autograd.record():
        mean = loss(net(x), y).mean()
    mean.backward()


def _average(net: mx.gluon.Block, group: Group) -> None:
    gradients = [parameter.grad() for parameter in network.trainable(net).values()]
    group.sum_(gradients)
    for gradient in gradients:
        gradient /= group.size


def _gradients(net: mx.gluon.Block) -> dict[str, Any]:
    return {name: parameter.grad().asnumpy() for name, parameter in network.trainable(net).items()}


def _all_rows(array: mx.nd.NDArray, name: str) -> mx.nd.NDArray:
    import horovod.mxnet as hvd

    return hvd.allgather(array, name=f"mxdist.verify.{name}")


@contextmanager
def _as_before(net: mx.gluon.Block) -> Iterator[None]:
    """Leave weights, statistics and gradients as they were."""
    arrays = [array for parameter in network.parameters(net).values() for array in parameter.list_data()]
    arrays += [array for parameter in network.trainable(net).values() for array in parameter.list_grad()]
    kept = [array.copy() for array in arrays]
    try:
        yield
    finally:
        for array, old in zip(arrays, kept, strict=True):
            array[:] = old
