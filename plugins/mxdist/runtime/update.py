"""What happens to the mean gradient of the global batch: clipping, and one step of the optimizer.

The optimizer is built from the job and never taken as an object: one that served another trainer would bring its
``rescale_grad`` along, and a saved one its learning rate. Its state is plain arrays by parameter name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.errors import CheckpointError
from mxdist.runtime.schedule import rate
from mxdist.spec import Optimizer, OptimizerName

_TOGETHER = 45  # arrays in one aggregated update: MXNet's kernels take 60 at most


class Update:
    """The optimizer of one training.

    :param parameters: what is trained, by name; frozen ones are not among them.
    :param total: optimizer steps of the whole training, for the schedule.

    ``meet`` is for a layout in which other ranks update other parameters: it takes the sum of squares of the gradients
    here, shape (1,), and returns that of all.
    """

    def __init__(self, spec: Optimizer, parameters: Mapping[str, mx.gluon.Parameter], total: int) -> None:
        self._spec = spec
        self._total = total
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.weights = [parameter.data() for parameter in parameters.values()]
        self.gradients = [parameter.grad() for parameter in parameters.values()]
        self._optimizer = _build(spec)
        self._optimizer.param_dict = dict(enumerate(parameters.values()))  # a parameter's own lr_mult and wd_mult hold
        self._states = [self._optimizer.create_state(index, weight) for index, weight in enumerate(self.weights)]
        self.meet: Callable[[mx.nd.NDArray], mx.nd.NDArray] | None = None

    def apply(self, update: int) -> float:
        """Clip the mean gradient, make optimizer step ``update`` (from 1), return the learning rate.

        Nothing waits here: the norm and the factor stay on the device.
        """
        if self._spec.clip_norm is not None:
            clip(self.gradients, self._spec.clip_norm, self.meet)
        learning_rate = rate(self._spec, update, self._total)
        self._optimizer.lr = learning_rate
        if self._spec.name is OptimizerName.SGD:
            self._together()
        else:
            for index, weight in enumerate(self.weights):
                self._optimizer.update(index, weight, self.gradients[index], self._states[index])
        return learning_rate

    def state_arrays(self) -> dict[str, mx.nd.NDArray]:
        """Return the optimizer's arrays, by parameter name and position."""
        return named_state(self.names, self._states)

    def counts(self) -> dict[str, int]:
        """Return how often each parameter was updated."""
        counts = self._optimizer._index_update_count
        return {name: int(counts.get(index, 0)) for index, name in enumerate(self.names)}

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Go on from these update counts.

        :raises CheckpointError: they belong to other parameters.
        """
        known = self.counts()
        if set(counts) != set(known):
            different = ", ".join(sorted(set(counts) ^ set(known))[:5])
            raise CheckpointError(f"the checkpoint trained other parameters than this job does: {different}")
        self._optimizer._index_update_count.update({index: counts[name] for index, name in enumerate(self.names)})
        self._optimizer.num_update = max(counts.values(), default=0)

    def _together(self) -> None:
        for first, after in _neighbours(self.weights):
            for start in range(first, after, _TOGETHER):
                part = slice(start, min(start + _TOGETHER, after))
                indices = list(range(len(self.weights)))[part]
                self._optimizer.update(indices, self.weights[part], self.gradients[part], self._states[part])


def clip(
    gradients: Sequence[mx.nd.NDArray],
    largest: float,
    meet: Callable[[mx.nd.NDArray], mx.nd.NDArray] | None = None,
) -> None:
    """Scale the gradients so that their global norm is at most ``largest``; MXNet's own fails in float64.

    :param meet: see ``Update``.
    """
    if not gradients and meet is None:
        return
    total = mx.nd.sum(square_sums(gradients)) if gradients else mx.nd.zeros((1,), dtype="float64")
    norm = mx.nd.sqrt(total if meet is None else meet(total))
    factor = mx.nd.minimum(largest / norm, 1.0)
    for gradient in gradients:
        shaped = factor.as_in_context(gradient.context).reshape((1,) * gradient.ndim)
        mx.nd.broadcast_mul(gradient, shaped, out=gradient)


def square_sums(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Return the sum of squares of each array, on the first one's device; in the arrays' own precision."""
    there = arrays[0].context
    parts = [_square_sums(arrays[first:after]) for first, after in _neighbours(arrays)]
    return parts[0] if len(parts) == 1 else mx.nd.concat(*[part.as_in_context(there) for part in parts], dim=0)


def _neighbours(arrays: Sequence[mx.nd.NDArray]) -> list[tuple[int, int]]:
    """Return the stretches of arrays that are on one device, each by its first and the one after its last."""
    changes = [i for i in range(1, len(arrays)) if arrays[i].context != arrays[i - 1].context]
    return list(zip([0, *changes], [*changes, len(arrays)], strict=True))


def _square_sums(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    if all(array.dtype == np.float32 for array in arrays):
        return mx.nd.multi_sum_sq(*arrays, num_arrays=len(arrays))
    return mx.nd.concat(*[mx.nd.sum(mx.nd.square(array)).reshape((1,)) for array in arrays], dim=0)


def named_state(names: Sequence[str], states: Sequence[Any]) -> dict[str, mx.nd.NDArray]:
    """Return the arrays of an optimizer's states, by parameter name and position."""
    return {
        f"{name}/{position}": array
        for name, state in zip(names, states, strict=True)
        for position, array in enumerate(_arrays(state))
    }


def _build(spec: Optimizer) -> Any:
    if spec.name is OptimizerName.SGD:
        return mx.optimizer.SGD(
            learning_rate=spec.learning_rate, momentum=spec.momentum, wd=spec.weight_decay, rescale_grad=1.0
        )
    return mx.optimizer.Adam(
        learning_rate=spec.learning_rate, beta1=spec.beta1, beta2=spec.beta2, epsilon=spec.epsilon,
        wd=spec.weight_decay, rescale_grad=1.0,
    )  # fmt: skip


def _arrays(state: Any) -> tuple[mx.nd.NDArray, ...]:
    if state is None:
        return ()
    return tuple(state) if isinstance(state, tuple) else (state,)
