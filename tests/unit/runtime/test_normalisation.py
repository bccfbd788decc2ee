"""Which statistics a layout may have, and what a network with synchronised ones may become."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from mxdist.errors import SpecError
from mxdist.runtime import models, network, normalisation
from mxdist.runtime.parallel import Alone
from mxdist.spec import DType, Parallelism


class Twice(Alone):
    """Two ranks that hold the same rows: what one says, the other says too."""

    size = 2

    def sum_named_(self, array: mx.nd.NDArray, name: str) -> None:
        """Write the line of rank 0 for rank 1 as well, or double what is no table."""
        if array.ndim == 2:
            array[1] = array[0]
        else:
            array *= 2


def net_of(*more: Any) -> nn.HybridSequential:
    """Return a small initialised network with two normalisations."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"), *more, nn.BatchNorm(scale=False), nn.Dense(2))
    network.reseed(1, 0, 0)
    network.prepare(net, dtype=DType.FLOAT64, device=mx.cpu())
    net(mx.nd.zeros((1, 3, 6, 6), dtype="float64"))
    return net


def train(net: nn.HybridSequential, x: mx.nd.NDArray) -> dict[str, np.ndarray]:
    """Make one pass; return gradients and statistics."""
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    parts = network.parameters(net)
    found = {name: part.grad().asnumpy() for name, part in parts.items() if part.grad_req != "null"}
    return found | {name: part.data().asnumpy() for name, part in parts.items() if "running" in name}


@pytest.mark.parametrize(
    ("fields", "ways"),
    [
        ({"world_size": 2}, "set batch_norm to synchronised or frozen"),
        ({"world_size": 2, "accumulate": 2}, "set batch_norm to frozen"),
        ({"accumulate": 2}, "set batch_norm to frozen"),
        ({"strategy": "devices", "devices": 2}, "set batch_norm to frozen"),
    ],
)
def test_statistics_of_a_part_are_refused(fields: dict[str, Any], ways: str) -> None:
    with pytest.raises(SpecError, match=f"parallelism.batch_norm: 1, 3: BatchNorm takes .*{ways}"):
        normalisation.settle(net_of(), Parallelism.parse(fields), Twice())


STAGES: dict[str, Any] = {"stages": 2, "across": "processes"}


@pytest.mark.parametrize(
    ("layout", "nearest"),
    [
        ({"world_size": 2}, "one rank"),
        ({"world_size": 2, "accumulate": 2}, "one rank and accumulate 1"),
        ({"accumulate": 2}, "accumulate 1"),
        ({"strategy": "devices", "devices": 2}, "strategy allreduce on one rank"),
        ({"strategy": "pipeline", "stages": 2, "micro_batches": 2}, "micro_batches 1"),
        ({"strategy": "pipeline", **STAGES, "world_size": 2, "micro_batches": 2}, "micro_batches 1"),
        (
            {"strategy": "hybrid", "inside": "pipeline", **STAGES, "world_size": 4},
            "strategy model, whose stages see the whole batch",
        ),
    ],
)
def test_the_nearest_layout_that_can_is_named(layout: dict[str, Any], nearest: str) -> None:
    with pytest.raises(SpecError, match=f"or train with {nearest}$"):
        normalisation.settle(net_of(), Parallelism.parse(layout), Alone())


@pytest.mark.parametrize("kind", ["synchronised", "local"])
def test_devices_cannot_exchange_statistics(kind: str) -> None:
    document = {"strategy": "devices", "devices": 2, "batch_norm": kind, "lossy": ["batch_norm"]}
    refusal = f"{kind} statistics need strategy allreduce or parameter_server, not devices; use frozen"
    with pytest.raises(SpecError, match=refusal):
        normalisation.settle(net_of(), Parallelism.parse(document), Alone())


def test_micro_batches_may_use_their_own_statistics_on_purpose() -> None:
    lossy = {"micro_batches": 2, "batch_norm": "local", "lossy": ["batch_norm"]}
    normalisation.settle(net_of(), Parallelism.parse({"strategy": "pipeline", "stages": 2, **lossy}), Alone())


def test_one_process_keeps_gluons_own_layers() -> None:
    net = net_of()
    normalisation.settle(net, Parallelism.parse({"batch_norm": "synchronised"}), Alone())
    normalisation.settle(net, Parallelism(), Alone())
    assert [type(layer) for _, layer in network.layers(net) if network.is_batch_norm(layer)] == [nn.BatchNorm] * 2


def test_frozen_statistics_stay_on_one_rank_too() -> None:
    net = net_of()
    normalisation.settle(net, Parallelism.parse({"batch_norm": "frozen"}), Alone())
    found = train(net, mx.nd.random.normal(3, 2, (4, 3, 6, 6), dtype="float64"))
    assert (found["1.running_mean"] == 0).all()
    assert (found["1.running_var"] == 1).all()
    assert (found["1.gamma"] != 0).any()


def test_same_rows_on_two_ranks_are_as_on_one() -> None:
    """The statistics of a batch and of the same batch twice are equal, so all else is."""
    x = mx.nd.array(np.random.RandomState(0).randn(4, 3, 6, 6) * 2 + 3, dtype="float64")
    expected, net = train(net_of(), x), net_of()
    normalisation.synchronise(net, Twice())
    found = train(net, x)
    assert found.keys() == expected.keys()
    assert max(float(np.abs(found[name] - expected[name]).max()) for name in found) < 1e-12


def test_a_channel_far_from_zero_keeps_its_variance() -> None:
    """A sum of squares less the square of the mean would lose it in float32."""
    layer = nn.BatchNorm(in_channels=2)
    layer.initialize()
    normalisation.synchronise(layer, Twice())
    x = np.random.RandomState(0).randn(64, 2).astype(np.float32) + 10_000
    with autograd.record():
        y = layer(mx.nd.array(x))
    wide = x.astype(np.float64)
    assert np.abs(y.asnumpy() - (wide - wide.mean(0)) / wide.std(0)).max() < 0.02


def test_a_graph_of_it_is_gluons_layer_and_never_trains() -> None:
    net = net_of()
    net.hybridize()
    normalisation.synchronise(net, Twice())
    assert "BatchNorm" in net(mx.sym.var("data")).tojson()
    x = mx.nd.ones((2, 3, 6, 6), dtype="float64")
    assert np.abs(net(x).asnumpy() - net_of()(x).asnumpy()).max() < 1e-12
    with pytest.raises(RuntimeError, match="cannot be hybridized"):
        net.hybridize()


def test_a_layer_of_ones_own_is_refused() -> None:
    class Own(nn.BatchNorm):
        """Somebody's own."""

    with pytest.raises(SpecError, match="3 is a Own: only BatchNorm layers of Gluon itself can be synchronised"):
        normalisation.synchronise(net_of(Own()), Twice())


def test_names_and_values_stay() -> None:
    net = models.build("resnet18_v2", {"classes": 3, "thumbnail": True})
    network.prepare(net, dtype=DType.FLOAT64, device=mx.cpu())
    net(mx.nd.zeros((1, 3, 8, 8), dtype="float64"))
    before = {name: id(parameter) for name, parameter in network.parameters(net).items()}
    normalisation.synchronise(net, Twice())
    assert {name: id(parameter) for name, parameter in network.parameters(net).items()} == before
    layers = [layer for _, layer in network.layers(net) if isinstance(layer, normalisation.Synchronised)]
    assert len(layers) == 18  # on the inputs, two in each of 8 blocks, before the pooling


def test_statistics_of_inputs_that_nothing_learns_from_stay_as_gluon_leaves_them() -> None:
    """Gluon moves them in a backward pass that does not come here: as in the first layer of ResNet v2."""
    nets = [nn.HybridSequential(), nn.HybridSequential()]
    for net in nets:
        net.add(nn.BatchNorm(scale=False, center=False, in_channels=3), nn.Dense(2, in_units=3))
        net.initialize()
    normalisation.synchronise(nets[1], Twice())
    plain, ours = (train(net, mx.nd.random.normal(3, 2, (8, 3)))["0.running_mean"] for net in nets)
    assert plain.tolist() == ours.tolist() == [0, 0, 0]
