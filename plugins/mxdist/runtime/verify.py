"""Whether the planned world trains as one process does: found out in two steps, before the long training.

The planned layout makes two steps, of a full batch and of the last, perhaps small one. Rank 0 makes the same steps by
itself in the plainest way: the mean loss of the whole global batch, on one device. Rank 0's gradients and weights go to
all ranks, and each compares those that it holds. Both sides are networks of their own, made from the same seed and
thrown away: what is trained afterwards begins from the same bits as without the check. Both compute in float64, where
rounding does not hide a fault, and without the noise of dropout.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn
from numpy.typing import NDArray

from mxdist.errors import TrainingFailed
from mxdist.runtime import network, setup
from mxdist.runtime.batches import Examples, Feed, order, steps_of
from mxdist.runtime.parallel import Alone, Group, layouts
from mxdist.runtime.worker import Worker
from mxdist.spec import BatchNorm, DType, Parallelism, Strategy, TrainingJob

log = logging.getLogger(__name__)

BOUND = 1e-9
"""Largest difference that is rounding, over the largest number compared; for layouts that compute in float64."""

FLOAT32_BOUND = 1e-4
"""The same for MXNet's parameter servers, which compute in float32 whatever they are given."""

_HALF_ROUNDING, _HALF_SMALLEST = 2.0**-11, 2.0**-25


@dataclass(frozen=True)
class Difference:
    """How far the arrays of one rank are from those of one process, at most.

    :param absolute: the largest difference of two numbers; infinite if one is not finite.
    :param relative: the same over the largest number that one process has in this array.
    :param share: the same over the largest number that one process has in any array.
    """

    name: str
    absolute: float
    relative: float
    share: float

    def text(self) -> str:
        """Return it in words."""
        return f"{self.name} differs by up to {self.absolute:.3g}, {self.relative:.3g} of its largest value"


def largest_difference(found: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]]) -> Difference:
    """Return the largest difference of arrays of the same name.

    :param found: some of the names of ``wanted``.
    """
    scale = max((float(np.abs(one).max()) for one in wanted.values() if one.size), default=0.0)
    worst = Difference("nothing", 0.0, 0.0, 0.0)
    for name, array in found.items():
        distance = np.abs(array - wanted[name])
        absolute = float(distance.max()) if np.isfinite(distance).all() else math.inf
        if absolute > worst.absolute:
            own = float(np.abs(wanted[name]).max())
            worst = Difference(name, absolute, _over(absolute, own), _over(absolute, scale))
    return worst


def _over(absolute: float, largest: float) -> float:
    return absolute / largest if largest else math.inf


def check(job: TrainingJob, worker: Worker, group: Group) -> None:
    """Compare two steps of the planned world with those of one process; every rank must call it.

    :raises TrainingFailed: they differ (not retryable), or the network draws random numbers, so that nothing can be
        compared.
    """
    with worker.busy(0):
        worst = _Check(job.effective(), worker, group).run()
    worker.log_metrics({"layout_difference": worst}, step=0)
    log.info("two steps of the planned layout are those of one process, up to %.3g of the largest number", worst)


class _Check:
    def __init__(self, job: TrainingJob, worker: Worker, group: Group) -> None:
        self._group = group
        self._servers = job.parallelism.strategy is Strategy.PARAMETER_SERVER
        self._job = job if self._servers else job.model_copy(update={"dtype": DType.FLOAT64})
        self._setup = setup.build(self._job, worker, group)
        _silence(self._setup, self._job.parallelism.staged)
        self._layout = layouts.choose(self._job, self._setup, group, worker)
        self._group.broadcast_(network.arrays(self._setup.net))
        self._device = worker.devices[0]
        self._alone = _OneProcess(self._job, worker, network.arrays(self._setup.net)) if group.rank == 0 else None

    def run(self) -> float:
        """Return the largest difference, as a share of the largest number."""
        worst = 0.0
        try:
            for number, step in enumerate((0, steps_of(len(self._setup.train), self._job.batch_size) - 1), start=1):
                worst = max(worst, self._step(number, step))
        finally:
            self._layout.close()
        return worst

    def _step(self, number: int, step: int) -> float:
        job, layout = self._job, self._layout
        rows = order(len(self._setup.train), seed=job.seed, epoch=0, shuffle=job.shuffle)
        feed = Feed(
            self._setup.train, job.batch_size,
            rank=layout.data_rank, size=layout.data_size, device=self._device, dtype=job.dtype.value,
        )  # fmt: skip
        layout.backward(next(feed.batches(rows, step)))
        norms = self._norms()
        layout.reduce()
        found = _values(dict(zip(layout.updater.names, layout.updater.gradients, strict=True)))
        chosen = rows[step * job.batch_size : (step + 1) * job.batch_size]
        wanted = self._shared(self._alone.gradients(chosen) if self._alone else None, trained=True)
        if layout.half is not None:
            return self._lossy(number, found, wanted, norms)
        worst = self._judge(f"the gradient at step {number}", largest_difference(found, wanted))
        layout.update(number)
        layout.gather(state=False)
        wanted = self._shared(self._alone.update(number) if self._alone else None, trained=False)
        found = _values(network.arrays(self._setup.net))
        return max(worst, self._judge(f"the weight after step {number}", largest_difference(found, wanted)))

    def _norms(self) -> float:
        """Return the norms of all ranks' gradients, added."""
        own = float(self._layout.squares().sum().asscalar())
        return float(self._group.total(np.array([math.sqrt(own) if math.isfinite(own) else 0.0]))[0])

    def _lossy(
        self, number: int, found: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]], norms: float
    ) -> float:
        """Compare gradients that travelled as float16 by their stated bound; both sides go on from the same weights."""
        ranks = self._group.size
        size = sum(array.size for array in wanted.values())
        bound = ranks * (_HALF_ROUNDING * norms + _HALF_SMALLEST * math.sqrt(size))
        off = math.sqrt(sum(float(np.square(array - wanted[name]).sum()) for name, array in found.items()))
        worst = largest_difference(found, wanted)
        share = 0.0 if off <= bound else math.inf
        self._judge(f"the gradient at step {number}, which float16 may change by {bound:.3g},", worst, share=share)
        self._layout.update(number)
        self._layout.gather(state=False)
        if self._alone is not None:
            self._alone.take(network.arrays(self._setup.net))
        return worst.share

    def _shared(self, mine: Mapping[str, NDArray[Any]] | None, *, trained: bool) -> dict[str, NDArray[Any]]:
        """Return on every rank what rank 0 has."""
        known = network.parameters(self._setup.net)
        known = {name: known[name] for name in self._layout.names} if trained else known
        arrays = {
            name: mx.nd.array(np.zeros(parameter.shape) if mine is None else mine[name], ctx=mx.cpu(), dtype="float64")
            for name, parameter in known.items()
        }
        self._group.broadcast_(arrays)
        return _values(arrays)

    def _judge(self, what: str, own: Difference, *, share: float | None = None) -> float:
        """Refuse the layout, on every rank, if any rank is too far off; return the largest share."""
        bound = FLOAT32_BOUND if self._servers else BOUND
        names = list(network.parameters(self._setup.net))
        index = names.index(own.name) if own.name in names else -1
        row = [own.share if share is None else share, own.absolute, own.relative, float(index)]
        table = self._group.gather([min(value, 1e300) for value in row])
        rank = int(table[:, 0].argmax())
        if table[rank, 0] <= bound:
            return float(table[rank, 0])
        worst = Difference(names[int(table[rank, 3])], table[rank, 1], table[rank, 2], table[rank, 0])
        raise TrainingFailed(
            f"the planned layout does not train as one process does: {what} of {worst.text()}, on rank {rank}.",
            rank=rank,
            hint="Nothing was trained. Is something in the network decided by the rank, or by which rows it sees at "
            "once? Try fewer ranks, devices or stages; without verify_layout it would train another model.",
            retryable=False,
        )


class _OneProcess:
    """The same job on one device of this process, in the plainest way.

    :param start: the weights to begin with.
    """

    def __init__(self, job: TrainingJob, worker: Worker, start: Mapping[str, mx.nd.NDArray]) -> None:
        frozen = job.parallelism.batch_norm is BatchNorm.FROZEN
        parallelism = Parallelism(batch_norm=BatchNorm.FROZEN if frozen else None)
        self._job = job.model_copy(update={"parallelism": parallelism, "dtype": DType.FLOAT64})
        self._setup = setup.build(self._job, _alone(worker), Alone())
        _silence(self._setup, False)
        self.take(start)

    def take(self, weights: Mapping[str, mx.nd.NDArray]) -> None:
        """Go on from these weights."""
        for name, array in network.arrays(self._setup.net).items():
            array[:] = mx.nd.array(weights[name].asnumpy(), ctx=array.context, dtype=array.dtype)

    def gradients(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the gradient of the mean loss of these rows."""
        examples: Examples = self._setup.train
        x = mx.nd.array(examples.x[rows], dtype=examples.x.dtype)
        y = mx.nd.array(examples.y[rows], dtype="float64")
        with autograd.record():
            loss = self._setup.loss(self._setup.forward(x), y).mean()
        loss.backward()
        update = self._setup.update
        return _values(dict(zip(update.names, update.gradients, strict=True)))

    def update(self, number: int) -> dict[str, NDArray[Any]]:
        """Make optimizer step ``number`` with the last gradient, clipped by hand; return the weights."""
        update, largest = self._setup.update, self._job.optimizer.clip_norm
        norm = math.sqrt(sum(float((one.asnumpy() ** 2).sum()) for one in update.gradients))
        if largest is not None and norm > largest:
            for gradient in update.gradients:
                gradient *= largest / norm
        update.apply(number)
        return _values(network.arrays(self._setup.net))


def _alone(worker: Worker) -> Worker:
    """Return this worker as the only rank, on the CPU: a network that is cut need not fit on one device."""
    found = copy.copy(worker)
    found.rank = found.local_rank = 0
    found.world_size = 1
    vars(found)["devices"] = [mx.cpu()]
    return found


def _silence(built: setup.Setup, staged: bool) -> None:
    """Switch dropout off before anything is traced.

    :raises TrainingFailed: random numbers are drawn all the same.
    """
    if not built.random:
        return
    for _, layer in network.layers(built.net):
        if isinstance(layer, nn.Dropout):
            layer._rate = 0
    left = network.random_ops(built.forward(mx.sym.var("data")))
    if left or staged:
        names = ", ".join(left) or "Dropout"
        raise TrainingFailed(
            f"verify_layout has nothing to compare: the network draws random numbers ({names}), others on every rank.",
            hint="Take them out of the network for the check, or train without verify_layout.",
            retryable=False,
        )


def _values(arrays: Mapping[str, mx.nd.NDArray]) -> dict[str, NDArray[Any]]:
    return {name: array.asnumpy().astype(np.float64) for name, array in arrays.items()}
