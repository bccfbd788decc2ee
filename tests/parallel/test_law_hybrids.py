"""The law where most of it meets: replicas of stages, devices and stages of several ranks, Adam, other networks.

The law finds every fault that is seeded here by itself, with the comparison of ranks switched off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.inprocess import trainer_of
from parallel.test_law import BOUND, Law, make_law
from parallel.test_law_models import NORM, RESNET, SIZE, sequences
from parallel.worlds import jobs

from mxdist.errors import SpecError

pytestmark = pytest.mark.layouts

MLP = {"name": "mlp", "params": {"hidden": 16}}
STAGES = {"across": "processes", "stages": 2, "micro_batches": 2}
REPLICAS = {"strategy": "hybrid", "inside": "pipeline", **STAGES}
INSIDE: tuple[dict[str, Any], ...] = (
    {"inside": "devices", "devices": 3},
    {"inside": "model", "stages": 2},
    {"inside": "pipeline", "stages": 2, "micro_batches": 3, "schedule": "gpipe"},
)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """The MLP with Adam; one row in the last batch, so that one replica has none."""
    return make_law(tmp_path_factory.mktemp("law") / "mlp", "adam", 73, network="mlp")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """LeNet with frozen BatchNorm; five rows in the last batch."""
    return make_law(tmp_path_factory.mktemp("law") / "frozen", "sgd", 77, network="lenet_frozen")


@pytest.mark.parametrize("inside", INSIDE, ids=lambda inside: str(inside["inside"]))
def test_hybrids_of_two_ranks_with_adam(mlp: Law, inside: dict[str, Any]) -> None:
    assert mlp.difference(ranks=2, model=MLP, parallelism={"strategy": "hybrid", **inside}) < BOUND


def test_replicas_of_stages_with_adam(mlp: Law) -> None:
    assert mlp.difference(ranks=4, model=MLP, mutation="nothing", parallelism=REPLICAS) < BOUND


@pytest.mark.parametrize(
    "mutation",
    [
        "stage_not_summed",
        "share_of_the_first_replica",
        "gathered_from_another_stage",
        "clip_before_reduce",
        "stale_activation",
        "wrong_weight_for_last_batch",
    ],
)
def test_each_seeded_fault_breaks_the_law(mlp: Law, mutation: str) -> None:
    broken = mlp.difference(ranks=4, model=MLP, mutation=f"{mutation}+unchecked", parallelism=REPLICAS)
    assert broken > 1000 * BOUND


@pytest.mark.parametrize(
    ("inside", "mutation"),
    [
        (0, "no_averaging"),
        (0, "clip_before_reduce"),
        (1, "wrong_weight_for_last_batch"),
        (2, "data_repeated"),
    ],
)
def test_each_seeded_fault_between_two_ranks_breaks_the_law(mlp: Law, inside: int, mutation: str) -> None:
    """What is inside a rank has faults of its own, in ``test_devices.py`` and ``test_stages.py``."""
    layout = {"strategy": "hybrid", **INSIDE[inside]}
    assert mlp.difference(ranks=2, model=MLP, mutation=f"{mutation}+unchecked", parallelism=layout) > 1000 * BOUND


def test_mlp_in_stages_of_two_ranks(mlp: Law) -> None:
    assert mlp.difference(ranks=2, model=MLP, parallelism={"strategy": "pipeline", **STAGES}) < BOUND


@pytest.mark.parametrize("layout", [{"strategy": "hybrid", **INSIDE[0]}, {"strategy": "pipeline", **STAGES}])
def test_frozen_batch_norm(frozen: Law, layout: dict[str, Any]) -> None:
    assert frozen.difference(ranks=2, model=NORM, parallelism={**layout, "batch_norm": "frozen"}) < BOUND


def test_transformer_encoder_in_replicas_of_stages(tmp_path: Path) -> None:
    law = make_law(tmp_path / "encoder", "adam", 73, network="encoder", data=sequences(73))
    model = {"name": "transformer_encoder", "params": {**SIZE, "pad_id": 0}}
    assert law.difference(ranks=4, model=model, parallelism=REPLICAS) < BOUND


def test_frozen_resnet_in_stages_of_two_ranks(tmp_path: Path) -> None:
    """Blocks whose branches join, cut between them: each stage a rank, and both on devices of each rank."""
    law = make_law(tmp_path / "resnet", "sgd", 75, network="resnet_frozen", shape=(3, 16, 16))
    (tmp_path / "resnet.py").write_text(RESNET)
    for layout in ({"strategy": "pipeline", **STAGES}, {"strategy": "hybrid", **INSIDE[2]}):
        frozen = {**layout, "batch_norm": "frozen"}
        assert law.difference(ranks=2, model={"recipe": str(tmp_path / "resnet.py")}, parallelism=frozen) < BOUND


def test_decoder_on_two_ranks_and_why_it_has_no_stages(tmp_path: Path) -> None:
    """Its loss leaves padding out, so sequences weigh differently; one rank of mxdist is what two are compared with."""
    tokens = np.random.RandomState(5).randint(1, 20, (21, 9)).astype(np.int32)
    tokens[::3, 5:] = 0
    small = jobs(tmp_path, {"train": (tokens, np.zeros(21, dtype=np.int64))})
    fields: dict[str, Any] = {
        "model": {"name": "transformer_decoder", "params": {**SIZE, "pad_id": 0}},
        "optimizer": {"name": "adam", "learning_rate": 0.005, "clip_norm": 1.0},
        "epochs": 3,
    }
    one, two = (small.train(f"ranks-{ranks}", parallelism={"world_size": ranks}, **fields) for ranks in (1, 2))
    assert one.keys() == two.keys()
    assert max(float(np.abs(one[name] - two[name]).max()) for name in one) < BOUND
    with pytest.raises(SpecError, match="wte and lm_head share a parameter, so they belong to one stage"):
        trainer_of(small, "stages", parallelism={"strategy": "model", "stages": 2}, **fields)
