"""What is loaded, what is new, and what must not move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from parallel.inprocess import trained_model, trainer_of
from parallel.worlds import Jobs, images, jobs

from mxdist.errors import SpecError, StoreError
from mxdist.runtime import finetune, network, normalisation
from mxdist.runtime.models import build
from mxdist.runtime.parallel import Alone, digest_arrays
from mxdist.spec import DType, Init, Parallelism

NORM = """
from mxnet.gluon import nn

def network(params):
    net = nn.HybridSequential()
    net.add(nn.Dense(6), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Dense(4), nn.BatchNorm(), nn.Dense(params["classes"]))
    return net
"""

TWO_HEADS = """
from mxnet.gluon import nn

class Net(nn.HybridBlock):
    def __init__(self, classes):
        super().__init__()
        with self.name_scope():
            self.body, self.unused, self.output = nn.Dense(4), nn.Dense(3, in_units=4), nn.Dense(classes)

    def hybrid_forward(self, F, x):
        return self.output(self.body(x))

def network(params):
    return Net(params["classes"])
"""


@pytest.fixture
def small(tmp_path: Path) -> Jobs:
    """Three classes."""
    return jobs(tmp_path, {"train": images(40)})


def net_of(classes: int, *, seed: int = 0) -> gluon.HybridBlock:
    """Return an initialised mlp for inputs of 4 numbers."""
    network.reseed(seed, 0, 0)
    net = build("mlp", {"classes": classes, "hidden": 5})
    network.prepare(net, dtype=DType.FLOAT32, device=mx.cpu())
    net(mx.nd.zeros((1, 4)))
    return net


def source_of(net: gluon.HybridBlock, labels: tuple[int, ...]) -> finetune.Source:
    """Return a network as a model to start from."""
    about = {"labels": list(labels), "label_digest": finetune.label_digest(labels)}
    return finetune.Source("/models/source", "d" * 64, about, finetune.as_arrays(net))


def init(**fields: Any) -> Init:
    """Return an init of some model."""
    return Init.parse({"model_uri": "/models/source", **fields})


def test_another_number_of_classes_needs_a_new_head() -> None:
    source = source_of(net_of(10), tuple(range(10)))
    with pytest.raises(SpecError) as refused:
        finetune.load(net_of(3), init(), source, labels=(0, 1, 2))
    said = str(refused.value)
    assert (
        "init.head: its classes stand for the labels [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], this job's for [0, 1, 2]" in said
    )
    assert "init.model_uri: output.weight has shape (10, 5) there, (3, 5) here" in said


def test_replaced_head_is_new_and_the_rest_is_loaded() -> None:
    source, net = source_of(net_of(10, seed=1), tuple(range(10))), net_of(3, seed=2)
    before = finetune.as_arrays(net)
    report = finetune.load(net, init(head="replace"), source, labels=(0, 1, 2))
    backbone = ("features.0.weight", "features.0.bias", "features.1.weight", "features.1.bias")
    assert (report.loaded, report.new) == (backbone, ("output.weight", "output.bias"))
    assert report.skipped == ("output.weight", "output.bias")
    assert report.counts() == {"init_loaded": 4.0, "init_skipped": 2.0, "init_new": 2.0}
    after = finetune.as_arrays(net)
    assert all((after[name] == source.arrays[name]).all() for name in backbone)
    assert (after["output.weight"] == before["output.weight"]).all()


def test_head_is_replaced_even_when_its_shape_would_fit() -> None:
    source, net = source_of(net_of(3, seed=1), (0, 1, 2)), net_of(3, seed=2)
    before = finetune.as_arrays(net)["output.weight"]
    finetune.load(net, init(head="replace"), source, labels=(3, 4, 5))
    assert (finetune.as_arrays(net)["output.weight"] == before).all()


def test_same_classes_with_another_meaning_are_refused_unless_asked_for() -> None:
    source, net = source_of(net_of(3, seed=1), (0, 1, 2)), net_of(3, seed=2)
    with pytest.raises(SpecError, match="set reuse_head on purpose"):
        finetune.load(net, init(), source, labels=(3, 4, 5))
    report = finetune.load(net, init(reuse_head=True), source, labels=(3, 4, 5))
    assert report.new == ()
    assert (finetune.as_arrays(net)["output.weight"] == source.arrays["output.weight"]).all()


def test_every_parameter_is_loaded_or_new_and_can_be_used() -> None:
    """A layer more than the model has: with Gluon's ``allow_missing`` the first forward would fail."""
    deeper = build("mlp", {"classes": 3, "hidden": 5, "layers": 3})
    network.prepare(deeper, dtype=DType.FLOAT32, device=mx.cpu())
    deeper(mx.nd.zeros((1, 4)))
    report = finetune.load(deeper, init(), source_of(net_of(3), (0, 1, 2)), labels=(0, 1, 2))
    assert set(report.loaded) | set(report.new) == set(network.parameters(deeper))
    assert report.new == ("features.2.weight", "features.2.bias")
    assert np.isfinite(deeper(mx.nd.ones((2, 4))).asnumpy()).all()


def test_a_model_without_any_known_name_is_refused() -> None:
    source = finetune.Source("/models/other", "", {"label_digest": finetune.label_digest((0,))}, {"x": np.zeros(1)})
    with pytest.raises(SpecError, match="no parameter of /models/other has a name that this network knows"):
        finetune.load(net_of(3), init(head="replace"), source, labels=(0, 1, 2))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"freeze": ["("]}, "init.freeze.0: '(' is not a regular expression"),
        (
            {"freeze": ["features", "nothing"]},
            "init.freeze.1: 'nothing' matches no parameter; there are features.0.weight",
        ),
        ({"freeze": ["."]}, "init.freeze: nothing is left to train"),
    ],
)
def test_freezing_says_what_is_wrong(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        finetune.freeze(net_of(3), init(**fields))
    assert problem in str(refused.value)


def test_backbone_and_expressions_freeze_parameters() -> None:
    net = net_of(3)
    assert finetune.freeze(net, init(freeze=[r"^features\.0\.", "output.bias"])) == (
        "features.0.weight",
        "features.0.bias",
        "output.bias",
    )
    assert list(network.trainable(net)) == ["features.1.weight", "features.1.bias", "output.weight"]
    assert finetune.freeze(net_of(3), init(freeze_backbone=True))[-1] == "features.1.bias"


def test_frozen_backbone_keeps_every_bit_running_statistics_too(small: Jobs, tmp_path: Path) -> None:
    """Under weight decay, with a trainable layer below one of the normalisations (apache/mxnet#6223, #4163)."""
    (tmp_path / "norm.py").write_text(NORM)
    model = {"recipe": str(tmp_path / "norm.py")}
    uri = trained_model(small, "first", model=model)
    trainer = trainer_of(
        small,
        "second",
        model=model,
        init={"model_uri": uri, "head": "replace", "freeze": [r"^[1-4]\."]},
        optimizer={"learning_rate": 0.1, "weight_decay": 0.5},
    )
    trainer._begin()
    frozen = set(trainer.setup.frozen)
    assert {"1.running_mean", "1.running_var", "1.gamma", "4.running_var", "3.weight"} <= frozen
    assert not any(name.startswith(("0.", "5.")) for name in frozen)
    before = network.arrays(trainer.setup.net)
    kept = digest_arrays({name: before[name] for name in frozen})
    moving = before["0.weight"].asnumpy()
    trainer._epoch()
    after = network.arrays(trainer.setup.net)
    assert digest_arrays({name: after[name] for name in frozen}) == kept
    assert (after["0.weight"].asnumpy() != moving).any()


def test_frozen_batch_norm_may_train_on_several_ranks() -> None:
    net = nn.HybridSequential()
    net.add(nn.Dense(3), nn.BatchNorm(), nn.Dense(2))
    network.prepare(net, dtype=DType.FLOAT32, device=mx.cpu())
    net(mx.nd.zeros((1, 4)))
    assert network.local_batch_norms(net) == ["1"]
    with pytest.raises(SpecError, match="freeze these layers"):
        normalisation.settle(net, Parallelism(world_size=2), Alone())
    normalisation.settle(net, Parallelism(), Alone())
    finetune.freeze(net, init(freeze_backbone=True))
    normalisation.settle(net, Parallelism(world_size=2), Alone())


def test_statistics_alone_can_be_frozen() -> None:
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=4), nn.Dense(2, in_units=4))
    net.initialize()
    assert finetune.freeze(net, init(freeze=["running_mean"])) == ("0.running_mean", "0.running_var")
    assert "0.gamma" in network.trainable(net)
    assert network.local_batch_norms(net) == []


def test_a_head_that_no_loss_reaches_is_named(small: Jobs, tmp_path: Path) -> None:
    """Gluon's trainer would raise a UserWarning about a stale gradient, or train by what was there before."""
    (tmp_path / "heads.py").write_text(TWO_HEADS)
    with pytest.raises(SpecError, match="the loss does not depend on unused.weight, unused.bias; freeze them"):
        trainer_of(small, "heads", model={"recipe": str(tmp_path / "heads.py")}).run()


def test_a_frozen_unused_head_does_not_stop_the_training(small: Jobs, tmp_path: Path) -> None:
    (tmp_path / "heads.py").write_text(TWO_HEADS)
    model = {"recipe": str(tmp_path / "heads.py")}
    first = net_source(small, model)
    fields = {"model": model, "init": {"model_uri": first, "freeze": ["unused"]}}
    assert trainer_of(small, "frozen", **fields).run().result["state"] == "done"


def net_source(small: Jobs, model: dict[str, Any]) -> str:
    """Return the URI of a model whose parameters have the names of ``TWO_HEADS``, without having trained it."""
    from mxdist.runtime import export
    from mxdist.store import open_store
    from mxdist.tracking import models

    trainer = trainer_of(small, "source", model=model)
    trainer._export(small.root / "exported")
    assert export.symbol_of(trainer.setup.forward, probabilities=True).list_outputs() == ["probabilities_output"]
    store = open_store(str(small.root / "published"))
    models.publish(small.root / "exported", store)
    return f"{store.uri}/model"


def test_chain_reports_where_it_came_from(small: Jobs) -> None:
    uri = trained_model(small, "first")
    trainer = trainer_of(small, "second", init={"model_uri": uri})
    result = trainer.run().result
    about = finetune.read(uri, small.job().storage)
    assert result["outputs"]["init"]["parent"] == about.digest
    assert len(result["outputs"]["init"]["loaded"]) == 6
    records = {record.key: record.value for record in trainer_journal(small)}
    assert records["init_loaded"] == 6
    assert records["init_new"] == records["init_frozen"] == 0


def trainer_journal(small: Jobs) -> list[Any]:
    """Return the journal of job ``second``."""
    from mxdist.tracking.journal import JournalReader

    return JournalReader(small.root / "work" / "second" / "0000000001" / "journal.jsonl").read()


def test_a_model_that_is_not_there(small: Jobs) -> None:
    with pytest.raises(SpecError, match="init.model_uri: there is no model at"):
        finetune.read(str(small.root / "nowhere" / "model"), small.job().storage)


def test_a_damaged_model_is_refused(small: Jobs) -> None:
    uri = trained_model(small, "first")
    path = Path(uri) / "params.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="params.npz is not what its manifest says"):
        finetune.read(uri, small.job().storage)
