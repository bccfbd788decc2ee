"""Ranks that meet through Horovod's allreduce.

Gradients are summed, never averaged here: Horovod divides in different places on different builds, so the division by
the number of examples is ours. All gradients of a step are one Horovod group: they are fused in one fixed order, which
keeps the sums, and so the weights, the same bit for bit from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.runtime.parallel.base import Alone, Float64, Group


class AllReduce(Group):
    """The world that Horovod's environment variables describe; joins it.

    Everything but gradients waits for its answer, so a name is never in flight twice.
    """

    def __init__(self) -> None:
        import horovod.mxnet as hvd

        hvd.init()
        self._hvd: Any = hvd
        self.rank = hvd.rank()
        self.size = hvd.size()

    def sum_(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Replace each array by its sum over all ranks, in one group."""
        self._hvd.grouped_allreduce_(list(arrays), op=self._hvd.Sum, name="mxdist.gradients")

    def sum_named_(self, array: mx.nd.NDArray, name: str) -> None:
        """Replace one array by its sum over all ranks, keyed by ``name``."""
        self._hvd.allreduce_(array, op=self._hvd.Sum, name=name)

    def total(self, values: Float64) -> Float64:
        """Return the sum over all ranks; float64 in, float64 between the ranks, float64 out."""
        tensor = mx.nd.array(values, ctx=mx.cpu(), dtype="float64")
        self._hvd.allreduce_(tensor, op=self._hvd.Sum, name=f"mxdist.total.{tensor.size}")
        summed: Float64 = tensor.asnumpy()
        return summed

    def broadcast_(self, arrays: Mapping[str, mx.nd.NDArray]) -> None:
        """Replace each array by rank 0's, in the order of their names."""
        for name in sorted(arrays):
            self._hvd.broadcast_(arrays[name], root_rank=0, name=f"mxdist.broadcast.{name}")
        for name in sorted(arrays):
            arrays[name].wait_to_read()

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes: first how many, then which."""
        size = int(self.total(np.array([float(len(data)) if self.rank == 0 else 0.0]))[0])
        content = np.frombuffer(data, dtype=np.uint8) if self.rank == 0 else np.zeros(size, dtype=np.uint8)
        if not size:
            return b""
        tensor = mx.nd.array(content, ctx=mx.cpu(), dtype="uint8")
        self.broadcast_({f"bytes.{size}": tensor})
        received: bytes = tensor.asnumpy().tobytes()
        return received

    def close(self) -> None:
        """Wait until all ranks are here, then leave; without that wait, a slower rank would find the world gone."""
        mx.nd.waitall()
        self.total(np.zeros(1))
        self._hvd.shutdown()


def join(world_size: int) -> Group:
    """Return the group of this process: Horovod's, or a group of one without it."""
    return AllReduce() if world_size > 1 else Alone()
