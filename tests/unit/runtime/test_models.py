"""The zoo under its own names, sizes that cannot work, and token ids that no table has."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon.model_zoo import vision

from mxdist.errors import DataError, SpecError
from mxdist.runtime import models, network
from mxdist.spec import DType
from mxdist.spec.networks import CATALOGUE, DENSENETS, MOBILENETS, RESNETS, VGGS


def test_every_network_of_the_zoo_has_its_name_here() -> None:
    with pytest.raises(ValueError, match="Available options") as refused:
        vision.get_model("nothing")
    zoo = {line.strip() for line in str(refused.value).splitlines()[1:]}
    ours = {*RESNETS, *VGGS, *DENSENETS, *MOBILENETS, "alexnet", "inceptionv3", "squeezenet1.0", "squeezenet1.1"}
    assert ours == zoo
    assert zoo < CATALOGUE.keys()


def scores(net: Any, side: int) -> tuple[int, ...] | None:
    """Return the shape of the outputs for two images, or None where MXNet fails."""
    try:
        return tuple(net(mx.sym.var("data")).infer_shape(data=(2, 3, side, side))[1][0])
    except (mx.MXNetError, ValueError):
        return None


@pytest.mark.filterwarnings("ignore:Cannot decide shape")
@pytest.mark.parametrize(
    "name",
    ["cifar_cnn", "lenet", "vgg11", "alexnet", "densenet121", "squeezenet1.0", "squeezenet1.1", "inceptionv3"],
)
def test_sizes_are_the_least_and_largest_that_work(name: str) -> None:
    net = models.build(name, {"classes": 7})
    least, largest = CATALOGUE[name].sides
    assert scores(net, least) == (2, 7)
    assert scores(net, least - 1) != (2, 7)
    if largest is not None:
        assert scores(net, largest) == (2, 7)
        assert scores(net, largest + 1) != (2, 7)


@pytest.mark.parametrize("name", ["resnet18_v1", "resnet18_v2", "mobilenet0.25", "mobilenetv2_0.25"])
def test_networks_for_images_of_any_size(name: str) -> None:
    net = models.build(name, {"classes": 7})
    assert [scores(net, side) for side in (1, 28, 32, 224)] == [(2, 7)] * 4


def test_parameters_of_the_zoo_reach_it() -> None:
    small = models.build("resnet18_v1", {"classes": 5, "thumbnail": True})
    network.prepare(small, dtype=DType.FLOAT64, device=mx.cpu())
    assert small(mx.nd.zeros((1, 1, 8, 8), dtype="float64")).shape == (1, 5)
    assert network.parameters(small)["features.0.weight"].shape == (64, 1, 3, 3)
    assert network.head(small) == ("output.weight", "output.bias")
    assert not network.random_ops(models.build("densenet121", {"classes": 5})(mx.sym.var("data")))
    assert network.random_ops(models.build("densenet121", {"classes": 5, "dropout": 0.2})(mx.sym.var("data")))


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("lenet", (1, 12, 12), "lenet takes images of at least 16 x 16 pixels; these are 12 x 12"),
        ("vgg16_bn", (1, 28, 28), "vgg16_bn takes images of at least 32 x 32 pixels; these are 28 x 28"),
        ("squeezenet1.0", (3, 213, 430), "at least 213 x 213 and at most 420 x 420 pixels; these are 213 x 430"),
        ("resnet18_v1", (28, 28), "takes images (channels, height, width), not examples of shape (28, 28)"),
        ("bert_base", (513,), "bert_base takes at most 512 tokens; these examples have 513"),
        ("bert_base", (3, 32, 32), "bert_base takes token ids (tokens,), not examples of shape (3, 32, 32)"),
    ],
)
def test_examples_that_cannot_work(name: str, shape: tuple[int, ...], problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        models.check_inputs(name, {}, shape)
    assert problem in str(refused.value)
    assert "model.name" in str(refused.value)


def tokens(*rows: list[int]) -> np.ndarray:
    """Return token ids."""
    return np.array(rows, dtype=np.int32)


def fit(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit token ids to a network with a vocabulary of 5."""
    return models.fit(name, {"vocabulary": 5}, x, np.zeros(len(x)), x.shape[1:], "train")


def test_targets_of_a_decoder_are_the_next_tokens() -> None:
    x, y = fit("transformer_decoder", tokens([1, 2, 3, 4], [4, 3, 2, 1]))
    assert x.tolist() == [[1, 2, 3], [4, 3, 2]]
    assert y.tolist() == [[2, 3, 4], [3, 2, 1]]


@pytest.mark.parametrize(
    ("name", "x", "problem"),
    [
        ("transformer_encoder", tokens([0, 5]), "go from 0 to 5, but the vocabulary has 5"),
        ("transformer_decoder", tokens([0, 1, 5]), "go from 1 to 5, but the vocabulary has 5"),
        ("transformer_encoder", tokens([-1, 2]), "go from -1 to 2, but the vocabulary has 5"),
        ("transformer_encoder", tokens([0, 1]).astype(np.float32), "holds float32; token ids must be integers"),
        ("transformer_decoder", tokens([0]), "has examples of 1 tokens; there is no next one"),
    ],
    ids=["too-large", "target-too-large", "negative", "floats", "no-next"],
)
def test_token_ids_that_no_table_has(name: str, x: np.ndarray, problem: str) -> None:
    """MXNet would quietly take the last row of the table."""
    with pytest.raises(DataError, match=problem):
        fit(name, x)


def test_gradients_are_replaced_at_every_step_whatever_a_recipe_wants() -> None:
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(3, in_units=2), mx.gluon.nn.Dense(1, in_units=3))
    net.collect_params().setattr("grad_req", "add")
    net[1].weight.grad_req = "null"
    network.prepare(net, dtype=DType.FLOAT64, device=mx.cpu())
    assert [one.grad_req for one in net.collect_params().values()] == ["write", "write", "null", "write"]
    for _ in range(2):
        with mx.autograd.record():
            loss = net(mx.nd.ones((1, 2), dtype="float64")).sum()
        loss.backward()
    assert net[1].bias.grad().asscalar() == 1
