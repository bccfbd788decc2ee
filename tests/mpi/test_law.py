"""The law over MPI: the weights and losses of one process, as over Gloo.

Two to four ranks that mpirun gave their places, against the plain Gluon loop of ``reference.py``; float64, 20 steps,
momentum and Adam, clipping, a last batch that leaves a rank without rows, BatchNorm over all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.mxnet as hvd
import pytest
from parallel.test_law import BOUND, Law, make_law
from parallel.test_law_models import NORM, SIZE, TOGETHER, sequences
from parallel.worlds import images

MPI = {"controller": "mpi"}


def law_of(root: Path, optimizer: str, rows: int, **options: Any) -> Law:
    """Return a law whose jobs have an mpirun."""
    law = make_law(root, optimizer, rows, **options)
    law.jobs.mpirun = True
    return law


@pytest.fixture(scope="module", params=["sgd", "adam"])
def lenet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Law:
    """73 examples: the last batch of an epoch has one row, so one of two ranks has none."""
    return law_of(tmp_path_factory.mktemp("law") / request.param, request.param, 73)


def test_this_horovod_has_both() -> None:
    assert hvd.mpi_built()
    assert hvd.gloo_built()


@pytest.mark.parametrize("ranks", [2, 4])
def test_lenet(lenet: Law, ranks: int) -> None:
    assert lenet.difference(ranks=ranks, parallelism=MPI) < BOUND


def test_the_same_horovod_over_gloo(lenet: Law) -> None:
    assert lenet.difference(ranks=2) < BOUND


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_mlp(tmp_path: Path, optimizer: str) -> None:
    law = law_of(tmp_path / "mlp", optimizer, 77, network="mlp", data=images(77, shape=(1, 16, 16)))  # 5 rows: 2 and 3
    assert law.difference(ranks=2, model={"name": "mlp", "params": {"hidden": 16}}, parallelism=MPI) < BOUND


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_synchronised_batch_norm(tmp_path: Path, optimizer: str) -> None:
    law = law_of(tmp_path / "norm", optimizer, 73, network="lenet_norm")
    together = {**TOGETHER["parallelism"], **MPI}
    assert law.difference(ranks=2, model=NORM, parallelism=together) < BOUND
    assert (
        law.difference(ranks=2, model=NORM, mutation="local_statistics+unchecked", parallelism=together) > 1000 * BOUND
    )


def test_accumulation(lenet: Law) -> None:
    assert lenet.difference(ranks=2, parallelism={**MPI, "accumulate": 3}) < BOUND


def test_pipeline_across_processes(tmp_path: Path) -> None:
    """Two replicas of two stages: process sets and broadcasts between neighbours, over MPI."""
    law = law_of(tmp_path / "encoder", "adam", 73, network="encoder", data=sequences(73))
    model = {"name": "transformer_encoder", "params": {**SIZE, "pad_id": 0}}
    staged = {"strategy": "pipeline", "across": "processes", "stages": 2, "micro_batches": 4, "world_size": 2}
    assert law.difference(ranks=2, model=model, parallelism={**MPI, **staged}) < BOUND


@pytest.mark.parametrize(
    "mutation", ["no_averaging", "clip_before_reduce", "wrong_weight_for_last_batch", "data_repeated", "no_broadcast"]
)
def test_each_seeded_fault_breaks_the_law(lenet: Law, mutation: str) -> None:
    assert lenet.difference(ranks=2, mutation=f"{mutation}+unchecked", parallelism=MPI) > 1000 * BOUND
