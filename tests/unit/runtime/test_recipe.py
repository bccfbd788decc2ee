"""Networks by name, and recipes of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from parallel.inprocess import trainer_of
from parallel.worlds import images, jobs

from mxdist.errors import DataError, SpecError
from mxdist.runtime import network
from mxdist.runtime.models import build
from mxdist.runtime.recipe import Recipe, accuracy
from mxdist.spec import DType, Model

GOOD = "from mxnet.gluon import nn\ndef network(params): return nn.Dense(params['classes'])\n"


def recipe(tmp_path: Path, text: str) -> Recipe:
    """Return the recipe with this text."""
    (tmp_path / "own.py").write_text(text)
    return Recipe(Model.parse({"recipe": str(tmp_path / "own.py")}))


def refusal(action: Any) -> str:
    """Return what is said when ``action`` is refused."""
    with pytest.raises(SpecError) as refused:
        action()
    return str(refused.value)


@pytest.mark.parametrize("name", ["cifar_cnn", "lenet", "mlp"])
def test_networks_by_name(name: str) -> None:
    net = build(name, {"classes": 4})
    network.prepare(net, dtype=DType.FLOAT64, device=mx.cpu())
    assert net(mx.nd.zeros((2, 1, 28, 28), dtype="float64")).shape == (2, 4)
    assert network.head(net) == ("output.weight", "output.bias")
    assert all(parameter.dtype == "float64" for parameter in net.collect_params().values())
    assert not network.local_batch_norms(net)


def test_cifar_cnn_is_the_guides() -> None:
    net = build("cifar_cnn", {"classes": 10})
    network.prepare(net, dtype=DType.FLOAT32, device=mx.cpu())
    net(mx.nd.zeros((1, 3, 32, 32)))
    shapes = {name: parameter.shape for name, parameter in network.parameters(net).items()}
    assert shapes == {
        "features.0.weight": (32, 3, 3, 3), "features.0.bias": (32,),
        "output.weight": (10, 32 * 15 * 15), "output.bias": (10,),
    }  # fmt: skip


def test_unknown_and_wrong_parameters_are_all_named() -> None:
    said = refusal(lambda: build("lenet", {"classes": 2, "chanels": 3, "hidden": 0}))
    assert "model.params.chanels: lenet has no such parameter; known are classes, batch_norm, channels, hidden" in said
    assert "model.params.hidden: must be a whole number from 1, not 0" in said


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\n", "defines no network(params)"),
        ("def network(): pass\n", "must take (params)"),
        (GOOD + "def data(folder): pass\n", "data of"),
        (GOOD + "def preprocess(x): pass\n", "must take (F, x, params)"),
    ],
)
def test_recipes_say_what_is_wrong_with_them(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in refusal(lambda: recipe(tmp_path, text))


def test_recipes_that_are_not_there(tmp_path: Path) -> None:
    assert "there is no file" in refusal(lambda: Recipe(Model.parse({"recipe": str(tmp_path / "none.py")})))
    assert "there is no module" in refusal(lambda: Recipe(Model.parse({"recipe": "no.such.module"})))


def test_an_import_that_fails_inside_a_recipe_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        recipe(tmp_path, "import not_installed\n" + GOOD)


def test_a_network_that_is_no_hybrid_block(tmp_path: Path) -> None:
    found = recipe(tmp_path, "from mxnet import gluon\ndef network(params): return gluon.nn.Sequential()\n")
    assert "returned Sequential, not a HybridBlock" in refusal(found.network)


def test_a_recipe_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_the_recipe.py").write_text("UNITS = 6\n")
    text = "import beside_the_recipe as b\nfrom mxnet.gluon import nn\ndef network(params): return nn.Dense(b.UNITS)\n"
    assert recipe(tmp_path, text).network()._units == 6


def test_a_loss_that_is_no_value_for_each_example(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        GOOD
        + "from mxnet import gluon\nclass Mean(gluon.loss.SoftmaxCrossEntropyLoss):\n"
        + "    def hybrid_forward(self, F, p, l): return super().hybrid_forward(F, p, l).mean()\n"
        + "def loss(params): return Mean()\n"
    )
    small = jobs(tmp_path, {"train": images(20)})
    said = refusal(lambda: trainer_of(small, "mean", model={"recipe": str(tmp_path / "own.py")}))
    assert "the loss of 2 examples has shape (1,); it must be one value for each" in said


def test_labels_without_an_output_are_refused(tmp_path: Path) -> None:
    """MXNet's loss would quietly take the last output instead."""
    small = jobs(tmp_path, {"train": images(20, classes=3)})
    with pytest.raises(DataError, match="holds the label 2 in row 4, but the network has 2 outputs"):
        trainer_of(small, "few", model={"name": "mlp", "params": {"classes": 2}})


def test_types_that_mxnet_does_not_know_become_floats(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": (np.ones((6, 4), dtype=np.uint16), np.arange(6) % 2)})
    assert trainer_of(small, "wide", batch_size=2).setup.train.x.dtype == np.float32


def test_accuracy_is_one_number_for_each_example() -> None:
    output = mx.nd.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(mx.nd, output, mx.nd.array([1, 1, 1])).asnumpy().tolist() == [1, 0, 1]


def test_shared_parameters_have_one_name_and_the_last_layer_is_the_head() -> None:
    first = nn.Dense(4, in_units=4)
    net = nn.HybridSequential()
    net.add(first, nn.Dense(4, in_units=4, params=first.params), nn.Dense(2, in_units=4), nn.Activation("relu"))
    assert list(network.parameters(net)) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert network.head(net) == ("2.weight", "2.bias")


@pytest.mark.parametrize(
    ("layer", "random"), [(nn.Dropout(0.5), True), (nn.Dense(3), False), (nn.BatchNorm(), False)], ids=["d", "n", "b"]
)
def test_random_layers_are_found(layer: Any, random: bool) -> None:
    assert bool(network.random_ops(layer(mx.sym.var("data")))) is random


def test_reseeding_makes_the_same_numbers() -> None:
    numbers = []
    for rank in (0, 0, 1):
        network.reseed(3, rank, 7)
        numbers.append((mx.nd.random.uniform(shape=(2,)).asnumpy().tolist(), np.random.rand()))
    assert numbers[0] == numbers[1] != numbers[2]


def test_what_the_recipe_initialised_stays(tmp_path: Path) -> None:
    net = recipe(
        tmp_path,
        "from mxnet import init\nfrom mxnet.gluon import nn\ndef network(params):\n    net = nn.HybridSequential()\n"
        "    net.add(nn.Dense(2, in_units=3), nn.Dense(2, in_units=2))\n    net[0].initialize(init.Constant(7))\n"
        "    return net\n",
    ).network()
    network.prepare(net, dtype=DType.FLOAT32, device=mx.cpu())
    assert (net[0].weight.data() == 7).asnumpy().all()
    assert (net[1].weight.data() != 0).asnumpy().any()
