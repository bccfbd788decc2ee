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

from mxdist.errors import LaunchError, Problem, SpecError
from mxdist.runtime.parallel.base import Alone, Float64, Group, plain
from mxdist.spec.parallelism import Controller


class AllReduce(Group):
    """The world that Horovod's environment variables describe; joins it.

    Everything but gradients waits for its answer, so a name is never in flight twice.
    """

    def __init__(self) -> None:
        import horovod.mxnet as hvd

        super().__init__()
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
        """Replace each array by rank 0's, in the order of their names.

        Plain copies in host memory travel: the same array may be on a GPU on one rank and in host memory on another.
        """
        copies = {name: plain(array, mx.cpu()) for name, array in arrays.items()}
        for name in sorted(copies):
            self._hvd.broadcast_(copies[name], root_rank=0, name=f"mxdist.broadcast.{name}")
        for name in sorted(copies):
            copies[name].wait_to_read()
            arrays[name][:] = copies[name]

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


def join(world_size: int, controller: Controller = Controller.GLOO, device: mx.Context | None = None) -> Group:
    """Return the group of this process: Horovod's, or a group of one without it.

    :param controller: what ranks talk through.
    :param device: where gradients are; default: the CPU.
    :raises SpecError: this host's Horovod was built without what that needs.
    :raises LaunchError: MPI does not know of the other ranks.
    """
    if world_size == 1:
        return Alone()
    import horovod.mxnet as hvd

    check_built(hvd, controller, on_gpu=device is not None and device.device_type == "gpu")
    group = AllReduce()
    if group.size != world_size:
        raise LaunchError(
            f"Horovod sees a world of {group.size}, but the job has {world_size} ranks.",
            hint="Over MPI, ranks must be started by mpirun; the launcher of this host starts each by itself. Set "
            "parallelism.controller to gloo.",
            retryable=False,
        )
    return group


def check_built(hvd: Any, controller: Controller, *, on_gpu: bool) -> None:
    """Refuse what this host's Horovod cannot do, before it crashes or trains each rank for itself.

    :param hvd: Horovod, or what answers like it.
    :param on_gpu: gradients are on GPUs.
    :raises SpecError: naming what to build it with.
    """
    problems = []
    if controller is Controller.MPI and not hvd.mpi_built():
        fix = "rebuild it with HOROVOD_WITH_MPI=1 on a host that has Open MPI, or set gloo"
        problems.append(Problem("parallelism.controller", f"this host's Horovod was built without MPI; {fix}"))
    if controller is Controller.GLOO and not hvd.gloo_built():
        fix = "rebuild it with HOROVOD_WITH_GLOO=1, or set mpi"
        problems.append(Problem("parallelism.controller", f"this host's Horovod was built without Gloo; {fix}"))
    if on_gpu and not hvd.nccl_built():
        fix = "rebuild it with HOROVOD_GPU_OPERATIONS=NCCL, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        problems.append(Problem("parallelism", f"gradients are on GPUs, but Horovod was built without NCCL; {fix}"))
    if problems:
        raise SpecError("The job", problems)
