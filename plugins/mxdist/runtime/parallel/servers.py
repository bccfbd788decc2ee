"""Gradients that meet on MXNet's parameter servers; everything else that ranks say to each other goes through Horovod.

``dist_sync``: servers add the gradients of all workers and send the sum back; each worker makes the optimizer step
itself, so every worker has the same weights and optimizer state, bit for bit, as with allreduce. The sum is float32, in
the order in which the gradients arrive: with three workers or more, two runs may differ by rounding.

``dist_async``: the servers make the optimizer steps. Each push is a step of its own, with the mean gradient of the
worker's rows and the ``1 / workers`` part of the learning rate, so that as many pushes as there are workers move the
weights about as far as one step on the global batch. No worker waits for another until all meet.

With 2-bit compression, each worker sends of each number ``t``, ``-t`` or 0 (``t`` is the threshold) and keeps what it
did not send for the next step. While no number of its gradient is above ``t``, what it keeps stays below ``t``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.runtime import network
from mxdist.runtime.batches import Batch
from mxdist.runtime.counting import Counting, counter, told
from mxdist.runtime.parallel.base import Group
from mxdist.runtime.parallel.layout import Whole
from mxdist.runtime.update import Update
from mxdist.spec.parallelism import Compression, Parallelism


class Store:
    """The connection of this process to the servers of its world.

    Keys are given out in the order in which they are asked for, which is the same on every worker.
    """

    def __init__(self, wanted: Parallelism) -> None:
        self._kv: Any = mx.kv.create(wanted.kvstore.value)
        self._keys = 0
        if wanted.compression is Compression.TWO_BIT:
            self._kv.set_gradient_compression({"type": "2bit", "threshold": wanted.compression_threshold})

    @classmethod
    def of(cls, group: Group, wanted: Parallelism) -> Store:
        """Return the one connection of this rank in its world."""
        store: Store = group.once("servers", lambda: cls(wanted))
        return store

    @classmethod
    def leave(cls, group: Group) -> None:
        """Leave the servers, together with all other workers, which ends them; if this world has any."""
        store = group.forget("servers")
        if store is not None:
            mx.nd.waitall()
            store._kv = None  # MXNet leaves when nobody holds it any more

    def keep(self, arrays: Sequence[mx.nd.NDArray]) -> list[int]:
        """Keep arrays on the servers, with the values of one of the workers; return their keys. All workers wait."""
        keys = list(range(self._keys, self._keys + len(arrays)))
        self._keys += len(arrays)
        for key, array in zip(keys, arrays, strict=True):
            self._kv.init(key, array)
        return keys

    def push(self, keys: Sequence[int], arrays: Sequence[mx.nd.NDArray]) -> None:
        """Send arrays; returns at once. The first of them are the most urgent: the next forward pass needs them."""
        for order, (key, array) in enumerate(zip(keys, arrays, strict=True)):
            self._kv.push(key, array, priority=-order)

    def pull(self, keys: Sequence[int], arrays: Sequence[mx.nd.NDArray]) -> None:
        """Replace arrays by what the servers have, after all that this worker pushed before; returns at once."""
        for order, (key, array) in enumerate(zip(keys, arrays, strict=True)):
            self._kv.pull(key, out=array, priority=-order)

    def update_there(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Let the servers apply what is pushed; pickles the optimizer to them, so one worker must say it, once."""
        self._kv.set_optimizer(optimizer)


class Served(Whole):
    """The whole network on each worker; servers add the gradients, workers update.

    :param wanted: kind of store, and compression.
    """

    def __init__(
        self, graph: network.LossSum, updater: Update, group: Group, device: mx.Context, wanted: Parallelism
    ) -> None:
        super().__init__(graph, updater, group, device, wanted.accumulate)
        self._store = Store.of(group, wanted)
        self._keys: list[int] = []

    def reduce(self) -> None:
        """Sum the gradients over all workers; returns at once."""
        gradients = self.updater.gradients
        if not self._keys:
            self._keys = self._store.keep([mx.nd.zeros_like(gradient) for gradient in gradients])
        self._store.push(self._keys, gradients)
        self._store.pull(self._keys, gradients)


class RemoteUpdate(Update):
    """An optimizer that lives on the servers; its state is there only, and begins anew with each world."""

    def remote(self, workers: int) -> mx.optimizer.Optimizer:
        """Return the optimizer for the servers: for pushes of ``1 / workers`` of a mean gradient."""
        optimizer = copy.copy(self._optimizer)
        optimizer.lr = self._spec.learning_rate / workers
        optimizer.rescale_grad = float(workers)
        parameters = self._optimizer.param_dict  # which a copy does not have
        optimizer.lr_mult = {index: parameter.lr_mult for index, parameter in parameters.items()}
        optimizer.wd_mult = {index: parameter.wd_mult for index, parameter in parameters.items()}
        return optimizer

    def state_arrays(self) -> dict[str, mx.nd.NDArray]:
        """Return nothing."""
        return {}

    def counts(self) -> dict[str, int]:
        """Return no counts: each server has its own."""
        return {name: 0 for name in self.names}

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Begin anew."""

    @property
    def learning_rate(self) -> float:
        """The rate that as many pushes as there are workers make together."""
        return self._spec.learning_rate


class Free(Whole):
    """The whole network on each worker; servers update, and nobody waits for anybody until all meet.

    :param wanted: kind of store.
    """

    def __init__(
        self, graph: network.LossSum, updater: RemoteUpdate, group: Group, device: mx.Context, wanted: Parallelism
    ) -> None:
        super().__init__(graph, updater, group, device, wanted.accumulate)
        self._remote = updater
        self._store = Store.of(group, wanted)
        self._keys: list[int] = []
        self._seen = counter(group.size)
        self._late = mx.nd.zeros((2,), dtype="float64")  # all updates of others in between, and the most at once
        self._pushes = 0
        self._rows = 0

    def backward(self, batch: Batch) -> mx.nd.NDArray | None:
        """Compute the gradient of this worker's rows."""
        self._rows = batch.rows
        return super().backward(batch)

    def reduce(self) -> None:
        """Do nothing: each worker's gradient is used by itself."""

    def update(self, number: int) -> float:
        """Push the gradient, and pull the weights that the servers have by then; a worker without rows only pulls."""
        if not self._keys:
            self._begin()
        weights = self._keys[:-1]
        if self._rows:
            self._store.push(weights, self.updater.gradients)
            self._store.push(self._keys[-1:], [told(self._seen, self.group.rank)])
        self._store.pull(weights, self.updater.weights)
        self._store.pull(self._keys[-1:], [self._seen])
        if self._rows:
            self._count()
        return self._remote.learning_rate

    def gather(self, *, state: bool = True) -> None:
        """Wait until all pushes are applied, then give every worker the same weights; nobody goes on before."""
        super().gather(state=state)
        if not self._keys:
            return
        mx.nd.waitall()
        self._meet()
        self._store.pull(self._keys, [*self.updater.weights, self._seen])
        mx.nd.waitall()
        self._meet()

    def figures(self) -> dict[str, float]:
        """Return how many updates of others came between a worker's pull and its push: on average, and at most."""
        total, most = self._late.asnumpy()
        table = self.group.gather([total, float(self._pushes), most])
        self._late[:] = 0
        self._pushes = 0
        pushes = table[:, 1].sum()
        return {
            "staleness_mean": float(table[:, 0].sum() / pushes) if pushes else 0.0,
            "staleness_max": float(table[:, 2].max()),
        }

    def _begin(self) -> None:
        """Give the servers the weights, which are the same on all workers, and then the optimizer.

        The servers know parameters by their keys, so the optimizer's own numbers are shifted to them.
        """
        self._keys = self._store.keep([*self.updater.weights, self._seen])
        if self.group.rank == 0:
            remote = self._remote.remote(self.group.size)
            first = self._keys[0]
            for multipliers in (remote.lr_mult, remote.wd_mult):
                shifted = {first + index: value for index, value in multipliers.items()}
                multipliers.clear()
                multipliers.update(shifted)
            self._store.update_there(Counting(remote, self._keys[-1]))
        self._meet()

    def _count(self) -> None:
        late = self._seen[1 + self.group.rank].astype("float64")
        self._late[0:1] += late
        self._late[1:2] = mx.nd.maximum(self._late[1:2], late)
        self._pushes += 1

    def _meet(self) -> None:
        self.group.total(np.zeros(1))
