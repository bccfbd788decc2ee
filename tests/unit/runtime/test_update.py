"""One optimizer step, against its formula in numpy; and what an optimizer must not bring along."""

from __future__ import annotations

import math
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from mxdist.errors import CheckpointError
from mxdist.runtime.update import Update, clip
from mxdist.spec import Optimizer


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> dict[str, gluon.Parameter]:
    """Return parameters with values and gradients."""
    generator = np.random.RandomState(seed)
    found = {}
    for index, shape in enumerate(shapes):
        parameter = gluon.Parameter(f"p{index}", shape=shape, dtype="float64")
        parameter.initialize()
        parameter.set_data(mx.nd.array(generator.randn(*shape), dtype="float64"))
        parameter.grad()[:] = mx.nd.array(generator.randn(*shape), dtype="float64")
        found[f"p{index}"] = parameter
    return found


def update(spec: dict[str, Any], found: dict[str, gluon.Parameter], total: int = 10) -> Update:
    """Return an update of ``found``."""
    return Update(Optimizer.parse(spec), found, total)


def f32(value: float) -> float:
    """Return a scalar as MXNet's optimizers see it."""
    return float(np.float32(value))


def test_sgd_with_momentum_and_weight_decay() -> None:
    found = parameters((2, 3))
    weight, gradient = found["p0"].data().asnumpy(), found["p0"].grad().asnumpy()
    ours = update({"name": "sgd", "learning_rate": 0.5, "momentum": 0.5, "weight_decay": 0.25}, found)
    velocity = np.zeros_like(weight)
    for step in (1, 2, 3):
        ours.apply(step)
        velocity = 0.5 * velocity - 0.5 * (gradient + 0.25 * weight)
        weight = weight + velocity
    assert found["p0"].data().asnumpy() == pytest.approx(weight, abs=1e-14)


def test_adam() -> None:
    found = parameters((4,))
    weight, gradient = found["p0"].data().asnumpy(), found["p0"].grad().asnumpy()
    ours = update({"name": "adam", "learning_rate": 0.25, "beta1": 0.5, "beta2": 0.75, "epsilon": 2**-20}, found)
    mean = variance = np.zeros_like(weight)
    for step in (1, 2, 3):
        ours.apply(step)
        mean, variance = 0.5 * mean + 0.5 * gradient, 0.75 * variance + 0.25 * gradient**2
        corrected = f32(0.25 * math.sqrt(1 - 0.75**step) / (1 - 0.5**step))
        weight = weight - corrected * mean / (np.sqrt(variance) + 2**-20)
    assert found["p0"].data().asnumpy() == pytest.approx(weight, abs=1e-14)


def test_many_parameters_in_one_update_are_updated_as_each_alone() -> None:
    together = parameters(*[(3,)] * 100)
    alone = parameters(*[(3,)] * 100)
    update({"name": "sgd", "learning_rate": 0.1}, together).apply(1)
    for name, parameter in alone.items():
        update({"name": "sgd", "learning_rate": 0.1}, {name: parameter}).apply(1)
    assert all((together[name].data() == alone[name].data()).asnumpy().all() for name in together)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_clip_scales_to_the_global_norm(dtype: str) -> None:
    gradients = [mx.nd.array([[3.0, 4.0]], dtype=dtype), mx.nd.array([12.0], dtype=dtype)]
    clip(gradients, 1.3)
    assert np.concatenate([gradient.asnumpy().ravel() for gradient in gradients]) == pytest.approx([0.3, 0.4, 1.2])


@pytest.mark.parametrize("values", [[3.0, 4.0], [0.0, 0.0]])
def test_clip_leaves_small_gradients_alone(values: list[float]) -> None:
    gradient = mx.nd.array(values, dtype="float64")
    clip([gradient], 5.0)
    assert gradient.asnumpy().tolist() == values


def test_next_stage_does_not_learn_by_what_the_last_one_left() -> None:
    """A Gluon trainer leaves 1/batch in its optimizer, and the next one multiplies by it; ours are built anew."""
    first, second = parameters((3,)), parameters((3,))
    before = second["p0"].data().asnumpy()
    spec = {"name": "sgd", "learning_rate": 1.0, "momentum": 0.0}
    update(spec, first).apply(1)
    update(spec, second).apply(1)
    assert second["p0"].data().asnumpy() == pytest.approx(before - second["p0"].grad().asnumpy(), abs=1e-14)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_state_goes_on_and_the_jobs_rate_wins(name: str) -> None:
    """MXNet's own ``load_states`` brings the old rate and schedule along; here state is arrays and counts alone."""
    spec = {"name": name, "learning_rate": 0.01, "schedule": {"warmup_steps": 100}}
    first = update(spec, parameters((3,)), total=1000)
    for step in (1, 2, 3):
        first.apply(step)
    found = parameters((3,))
    second = update({"name": name, "learning_rate": 5.0}, found, total=1000)
    for key, array in second.state_arrays().items():
        array[:] = first.state_arrays()[key]
    second.set_counts(first.counts())
    assert second.apply(4) == 5.0
    assert second.counts() == {"p0": 4}
    same = {key: (array == first.state_arrays()[key]).asnumpy().all() for key, array in second.state_arrays().items()}
    assert not all(same.values())  # it was used, and moved on


def test_state_of_other_parameters_is_refused() -> None:
    first, second = update({}, parameters((3,), (2,))), update({}, parameters((3,)))
    with pytest.raises(CheckpointError, match="other parameters than this job does: p1"):
        second.set_counts(first.counts())


def test_sgd_without_momentum_has_no_state() -> None:
    ours = update({"name": "sgd", "momentum": 0.0}, parameters((3,)))
    ours.apply(1)
    assert ours.state_arrays() == {}


def test_gradients_are_those_that_backward_writes() -> None:
    found = parameters((2,))
    ours = update({"name": "sgd", "learning_rate": 1.0, "momentum": 0.0}, found)
    with autograd.record():
        loss = (found["p0"].data() * 3).sum()
    loss.backward()
    before = found["p0"].data().asnumpy()
    ours.apply(1)
    assert found["p0"].data().asnumpy() == pytest.approx(before - 3)
