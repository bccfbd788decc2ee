"""Rows that influence each other are found, whatever makes them do so, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from mxdist.errors import SpecError
from mxdist.runtime import independence, network
from mxdist.spec import DType


class Operator(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """Batch normalisation as an operator, which no layer's class tells of."""

    def __init__(self) -> None:
        super().__init__()
        for name, kind in (("gamma", "ones"), ("beta", "zeros"), ("mean", "zeros"), ("var", "ones")):
            grad = "null" if name in ("mean", "var") else "write"
            setattr(self, name, self.params.get(name, shape=(4,), init=kind, grad_req=grad))

    def hybrid_forward(self, F: Any, x: Any, gamma: Any, beta: Any, mean: Any, var: Any) -> Any:
        return F.BatchNorm(x, gamma, beta, mean, var)


class Centred(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """Subtracts the mean of the batch."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return F.broadcast_sub(x, F.mean(x, axis=0, keepdims=True))


class Contrast(mx.gluon.loss.Loss):  # type: ignore[misc]  # mxnet is untyped
    """A loss that compares each row with all."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    def hybrid_forward(self, F: Any, pred: Any, label: Any) -> Any:
        return F.sum(F.square(F.broadcast_sub(pred, F.mean(pred, axis=0, keepdims=True))), axis=1) + 0 * label


def mixers(*layers: nn.HybridBlock, loss: Any = None, dtype: DType = DType.FLOAT64) -> str:
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3), *layers)
    network.prepare(net, dtype=dtype, device=mx.cpu())
    recipe: Any = SimpleNamespace(prepare=lambda F, x, **_: x)
    forward = network.Forward(recipe, net, dtype=dtype, stored=dtype.value, shape=(3,))
    x = mx.nd.array(np.random.RandomState(0).standard_normal((3, 3)), dtype=dtype.value)
    y = mx.nd.array([0, 1, 2], dtype=dtype.value)
    return independence.row_mixers(forward, loss or mx.gluon.loss.SoftmaxCELoss(), x, y)


@pytest.mark.parametrize("dtype", list(DType))
def test_rows_that_stand_alone(dtype: DType) -> None:
    assert mixers(nn.LayerNorm(in_channels=4), nn.Dense(5, in_units=4), dtype=dtype) == ""


def test_gluons_batch_norm_is_settled_elsewhere() -> None:
    layer = nn.BatchNorm(in_channels=4)
    assert mixers(layer) == ""
    assert layer._kwargs["use_global_stats"] is False
    assert (layer.running_var.data().asnumpy() == 1).all()


def test_batch_norm_as_an_operator_is_named() -> None:
    assert "batchnorm" in mixers(Operator())


def test_batch_norm_as_an_operator_is_found_beside_dropout() -> None:
    assert "batchnorm" in mixers(Operator(), nn.Dropout(0.5))


@pytest.mark.parametrize("dtype", list(DType))
def test_layers_that_mix_rows_are_found_by_trying(dtype: DType) -> None:
    assert "computed alone" in mixers(Centred(), dtype=dtype)


def test_losses_that_mix_rows_are_found() -> None:
    assert "computed alone" in mixers(loss=Contrast())


def test_sparse_gradients_are_refused_by_name() -> None:
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), nn.Embedding(12, 4, sparse_grad=True))
    with pytest.raises(SpecError, match="1.weight: sparse parameters and gradients are not taken"):
        network.prepare(net, dtype=DType.FLOAT32, device=mx.cpu())
