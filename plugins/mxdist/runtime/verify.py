"""Whether the planned world trains as one process does: found out in a few steps, before the long training.

The planned layout makes two steps, of a full batch and of the last, perhaps small one. Rank 0 makes the same steps by
itself in the plainest way: the mean loss of the whole global batch, on one device. Rank 0's gradients, and what its
steps change, go to all ranks, and each compares those that it holds. Both sides are networks of their own, made from
the same seed and thrown away: what is trained afterwards begins from the same bits as without the check. Both compute
in float64, where rounding does not hide a fault, and without the noise of dropout.

All steps are made at the job's own rate, without warm-up or decay: at a rate of nearly nothing, nothing shows. One step
more is made in the job's own precision, for some faults are float32's own, and without ``clip_norm``, which makes
gradients equal that are too large in different ways; rank 0 stays in float64.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn
from numpy.typing import NDArray

from mxdist.errors import TrainingFailed
from mxdist.runtime import judging, network, setup
from mxdist.runtime.batches import Examples, Feed, order, steps_of
from mxdist.runtime.judging import Bounds, Difference
from mxdist.runtime.parallel import Alone, Group, layouts
from mxdist.runtime.worker import Worker
from mxdist.spec import BatchNorm, DType, Parallelism, Schedule, Strategy, TrainingJob

log = logging.getLogger(__name__)

_HALF_ROUNDING, _HALF_SMALLEST = 2.0**-11, 2.0**-25
_HINT = (
    "Nothing was trained. Is something in the network decided by the rank, or by which rows it sees at once? Try fewer "
    "ranks, devices or stages; without verify_layout it would train another model."
)


def check(job: TrainingJob, worker: Worker, group: Group) -> None:
    """Compare steps of the planned world with those of one process; every rank must call it.

    :raises TrainingFailed: they differ (not retryable), or the network draws random numbers, so that nothing can be
        compared.
    """
    job = _with(job.effective(), schedule=Schedule())
    with worker.busy(0):
        if job.parallelism.strategy is Strategy.PARAMETER_SERVER:
            worst = _compare(job, judging.FLOAT32, worker, group)
        else:
            worst = _compare(job.model_copy(update={"dtype": DType.FLOAT64}), judging.EXACT, worker, group)
        if job.dtype is not DType.FLOAT64 or job.optimizer.clip_norm is not None:
            bounds = judging.EXACT if job.dtype is DType.FLOAT64 else judging.LOOSE
            _compare(_with(job, clip_norm=None), bounds, worker, group, last=False)
    worker.log_metrics({"layout_difference": worst}, step=0)
    log.info("steps of the planned layout are those of one process, up to %.3g of what they are measured by", worst)


def _compare(job: TrainingJob, bounds: Bounds, worker: Worker, group: Group, *, last: bool = True) -> float:
    with closing(_Check(job, bounds, worker, group)) as planned:
        return planned.run(last=last)


def _with(job: TrainingJob, **changed: Any) -> TrainingJob:
    """Return the job with another optimizer."""
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update=changed)})


class _Check:
    def __init__(self, job: TrainingJob, bounds: Bounds, worker: Worker, group: Group) -> None:
        self._job, self._bounds, self._group = job, bounds, group
        self._setup = setup.build(job, worker, group)
        _silence(self._setup, job.parallelism.staged)
        self._layout = layouts.choose(job, self._setup, group, worker)
        self._group.broadcast_(network.arrays(self._setup.net))
        self._device = worker.devices[0]
        self._alone = _OneProcess(job, worker, network.arrays(self._setup.net)) if group.rank == 0 else None

    def close(self) -> None:
        """Let go of the layout."""
        self._layout.close()

    def run(self, *, last: bool) -> float:
        """Return the largest difference, as a share of what it is measured by.

        :param last: not only the first batch of an epoch, but the last one, too.
        """
        steps = (0, steps_of(len(self._setup.train), self._job.batch_size) - 1) if last else (0,)
        try:
            return max(self._step(number, step) for number, step in enumerate(steps, start=1))
        finally:
            self._layout.close()

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
        own = judging.gradients(found, wanted, self._bounds)
        worst = self._judge(f"the gradient at step {number}", own, self._bounds.gradient)
        return max(worst, self._update(number))

    def _update(self, number: int) -> float:
        """Make the step; compare what it changes: weights with weights, running statistics with their like."""
        before = _values(network.arrays(self._setup.net))
        self._layout.update(number)
        self._layout.gather(state=False)
        after = _values(network.arrays(self._setup.net))
        wanted = self._shared(self._alone.update(number) if self._alone else None, trained=False)
        trained = set(self._layout.names)
        worst = 0.0
        for what, names in (("weight", trained), ("statistics", set(after) - trained)):
            changed = {name: after[name] - before[name] for name in after if name in names}
            alone = {name: wanted[name] for name in changed}
            own = judging.changes(changed, alone, {name: before[name] for name in changed}, self._bounds)
            worst = max(worst, self._judge(f"the change of the {what} at step {number}", own, self._bounds.change))
        return worst

    def _norms(self) -> float:
        """Return the norms of all ranks' gradients, added."""
        own = float(self._layout.squares().sum().asscalar())
        return float(self._group.total(np.array([math.sqrt(own) if math.isfinite(own) else 0.0]))[0])

    def _lossy(
        self, number: int, found: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]], norms: float
    ) -> float:
        """Compare gradients that travelled as float16 by their stated bound; both sides go on from the same weights."""
        size = sum(array.size for array in wanted.values())
        bound = half_bound(self._layout.data_size, norms, size) + self._bounds.gradient * judging.norm(wanted)
        off = judging.norm({name: array - wanted[name] for name, array in found.items()})
        worst = judging.gradients(found, wanted, self._bounds)
        own = Difference(worst.name, worst.absolute, worst.relative, 0.0 if off <= bound else math.inf)
        self._judge(f"the gradient at step {number}, which float16 may change by {bound:.3g},", own, 0.0)
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

    def _judge(self, what: str, own: Difference, bound: float) -> float:
        """Refuse the layout, on every rank, if any rank is too far off; return the largest share."""
        where = "" if self._bounds is judging.EXACT else f" in {self._job.dtype.value}"
        what = f"the planned layout does not train as one process does{where}: {what}"
        names = list(network.parameters(self._setup.net))
        return judging.judge(own, bound, names, self._group, what=what, hint=_HINT)


def half_bound(ranks: int, norms: float, size: int) -> float:
    """Return how far a sum that travelled as float16 may be off, as a norm: see docs/parallelism.md.

    :param ranks: how many gradients were added.
    :param norms: their norms, added.
    :param size: numbers in each of them.
    """
    return ranks * (_HALF_ROUNDING * norms + _HALF_SMALLEST * math.sqrt(size))


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
        """Make optimizer step ``number`` with the last gradient, clipped by hand; return what it changed."""
        before = _values(network.arrays(self._setup.net))
        update, largest = self._setup.update, self._job.optimizer.clip_norm
        norm = math.sqrt(sum(float((one.asnumpy() ** 2).sum()) for one in update.gradients))
        if largest is not None and norm > largest:
            for gradient in update.gradients:
                gradient *= largest / norm
        update.apply(number)
        after = _values(network.arrays(self._setup.net))
        return {name: array - before[name] for name, array in after.items()}


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
