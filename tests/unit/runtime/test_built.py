"""What Horovod was built with, asked before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import horovod.mxnet
import pytest

from mxdist.errors import SpecError
from mxdist.runtime.parallel.allreduce import check_built
from mxdist.runtime.worker import Worker
from mxdist.spec import Controller


@dataclass
class Build:
    """Answers as Horovod does; NCCL is a version."""

    mpi: bool = False
    gloo: bool = False
    nccl: int = 0

    def mpi_built(self) -> bool:
        return self.mpi

    def gloo_built(self) -> bool:
        return self.gloo

    def nccl_built(self) -> int:
        return self.nccl


@pytest.mark.parametrize(
    ("build", "controller", "on_gpu", "words"),
    [
        (Build(gloo=True), Controller.MPI, False, "HOROVOD_WITH_MPI=1"),
        (Build(mpi=True), Controller.GLOO, False, "HOROVOD_WITH_GLOO=1"),
        (Build(gloo=True), Controller.GLOO, True, "HOROVOD_GPU_OPERATIONS=NCCL"),
        (horovod.mxnet, Controller.MPI, False, "this host's Horovod was built without MPI"),
        (Build(gloo=True, nccl=21403), Controller.GLOO, True, ""),
        (Build(mpi=True), Controller.MPI, False, ""),
        (horovod.mxnet, Controller.GLOO, False, ""),
    ],
)
def test_what_was_not_built_is_refused(build: Build, controller: Controller, on_gpu: bool, words: str) -> None:
    if not words:
        check_built(build, controller, on_gpu=on_gpu)
        return
    with pytest.raises(SpecError, match=words):
        check_built(build, controller, on_gpu=on_gpu)


def test_all_that_is_missing_is_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        check_built(Build(), Controller.MPI, on_gpu=True)
    assert len(caught.value.problems) == 2


def test_a_rank_started_by_mpirun_knows_its_place() -> None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    worker = Worker.from_environment(dict(zip(names, ("3", "4", "1"), strict=True)))
    assert (worker.rank, worker.world_size, worker.local_rank) == (3, 4, 1)
