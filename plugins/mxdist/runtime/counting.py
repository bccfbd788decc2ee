"""What a parameter server does with a push when nobody waits: an optimizer step, or a count of who was late.

This module is read by the servers, from the pickled optimizer, so it imports nothing of mxdist.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

AROUND = 1 << 22
"""Where the count begins again at 0: float32 holds every whole number up to four times that."""


class Counting(mx.optimizer.Optimizer):  # type: ignore[misc]  # mxnet is untyped
    """An optimizer, and for one key a counter of updates.

    The counter's array has one place for the count and one for each worker. A worker pushes the count that it pulled
    last, and its own number; its place then tells how many updates of others came in between.

    :param inner: what updates all other keys.
    :param key: of the counter.
    """

    def __init__(self, inner: mx.optimizer.Optimizer, key: int) -> None:
        super().__init__(learning_rate=inner.lr)
        self._inner = inner
        self._key = key

    def create_state_multi_precision(self, index: Any, weight: mx.nd.NDArray) -> Any:
        """Return the state of one key."""
        return None if index == self._key else self._inner.create_state_multi_precision(index, weight)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Make one update; MXNet may give one key, or a list of one."""
        key = index[0] if isinstance(index, list | tuple) else index
        if key != self._key:
            self._inner.update_multi_precision(index, weight, grad, state)
            return
        counter, pushed = (one[0] if isinstance(one, list | tuple) else one for one in (weight, grad))
        values, told = counter.asnumpy(), pushed.asnumpy()
        values[1 + int(told[1])] = (values[0] - told[0]) % AROUND
        values[0] = (values[0] + 1) % AROUND
        counter[:] = mx.nd.array(values, dtype=values.dtype)


def counter(workers: int) -> mx.nd.NDArray:
    """Return the counter's first value."""
    return mx.nd.zeros((1 + workers,))


def told(seen: mx.nd.NDArray, rank: int) -> mx.nd.NDArray:
    """Return what a worker pushes: the count that it saw, and its number; shaped as the counter."""
    fixed = mx.nd.zeros(seen.shape)
    fixed[1] = rank
    return mx.nd.concat(seen[:1], fixed[1:], dim=0)
