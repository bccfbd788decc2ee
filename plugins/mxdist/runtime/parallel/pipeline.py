"""Layouts whose network is cut into stages: on the devices of one rank, or one stage a rank.

Model parallelism is a pipeline of one micro-batch. Gradients of all micro-batches are added up before the one update,
so nothing is ever computed with old weights. Around each replica of the stages, rows are shared as ever: ranks that
hold the same stage sum its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.runtime.batches import Batch
from mxdist.runtime.parallel.base import Group, plain
from mxdist.runtime.parallel.layout import Layout
from mxdist.runtime.parallel.links import Broken, Mailbox, Sets, Ways, mailboxes
from mxdist.runtime.parallel.runner import Runner, Timeline
from mxdist.runtime.parallel.stages import Stage, Stages
from mxdist.runtime.update import Update, named_state, square_sums
from mxdist.spec import Optimizer, Parallelism


class _StageLayout(Layout):
    """What both have in common: gradients of micro-batches are added to what is there."""

    def _clear(self) -> None:
        for gradient in self.updater.gradients:
            gradient[:] = 0


class DeviceStages(_StageLayout):
    """All stages on devices of this rank, each worked on by a thread of its own."""

    def __init__(self, stages: Stages, updater: Update, group: Group, parallelism: Parallelism) -> None:
        super().__init__(updater, group)
        self._links = mailboxes([stage.device for stage in stages.stages])
        self.runners = [
            Runner(stage, link, parallelism.schedule, parallelism.micro_batches, self.weight)
            for stage, link in zip(stages.stages, self._links, strict=True)
        ]
        self._threads = ThreadPoolExecutor(len(stages), thread_name_prefix="mxdist-stage")

    def backward(self, batch: Batch) -> mx.nd.NDArray | None:
        """Let every stage work through the micro-batches; waits until all have."""
        self._clear()
        if not batch.rows:
            return None
        running = [
            self._threads.submit(_run, runner, link, batch)
            for runner, link in zip(self.runners, self._links, strict=True)
        ]
        errors = [error for future in running if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, Broken)), errors[0])
        loss: mx.nd.NDArray = running[-1].result()
        return loss

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)

    def _sum(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Sum over ranks, on the first stage's device: what Horovod takes at once must be on one."""
        device = self.runners[0].stage.device
        together = [array.as_in_context(device) for array in arrays]
        super()._sum(together)
        for array, summed in zip(arrays, together, strict=True):
            if array is not summed:
                summed.copyto(array)

    def figures(self) -> dict[str, float]:
        """Return the bubble and the peaks of all ranks, in ranks' order."""
        return _figures(self.group, {runner.stage.index: runner.timeline for runner in self.runners}, len(self.runners))


def _run(runner: Runner, link: Mailbox, batch: Batch) -> mx.nd.NDArray:
    try:
        return runner.run(batch)
    except BaseException:
        link.close()
        raise


class RankStages(_StageLayout):
    """One stage on this rank.

    The other stages' weights and optimizer state lie in host memory, and are as old as the last ``gather``: with them,
    rank 0 saves and exports the whole model, and every rank validates a share of the examples. So a device needs memory
    for its own stage only, and a host needs memory for the whole model once for each of its ranks.
    """

    def __init__(
        self, stages: Stages, updater: StageUpdate, group: Group, sets: Sets, link: Ways, parallelism: Parallelism
    ) -> None:
        super().__init__(updater, group)
        self._whole, self._stages, self._sets = updater, stages, sets
        own = stages.stages[sets.stage]
        self._link = link
        self.runner = Runner(own, link, parallelism.schedule, parallelism.micro_batches, self.weight)
        self._weights_here = self._state_here = False
        places = [[updater.every.index(name) for name in updater.names]]
        self._places = mx.nd.array(places, ctx=own.device) if updater.names else None
        self._norm: mx.nd.NDArray | None = None
        updater.meet = self._squares_of_all

    @property
    def data_rank(self) -> int:
        """All stages of a replica read the same rows."""
        return self._sets.replica

    @property
    def data_size(self) -> int:
        """One share for each replica."""
        return self.group.size // self._sets.stages

    @property
    def names(self) -> list[str]:
        """All trained parameters, of whichever stage."""
        return self._whole.every

    def backward(self, batch: Batch) -> mx.nd.NDArray | None:
        """Work through the micro-batches; waits until this stage has."""
        self._clear()
        return self.runner.run(batch) if batch.rows else None

    def reduce(self) -> None:
        """Sum the gradients over the ranks that hold this stage."""
        if self._sets.of_stage is not None and self.updater.gradients:
            super().reduce()

    def _sum(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        hvd, name = self._sets.hvd, f"mxdist.gradients.{self._sets.stage}"
        hvd.grouped_allreduce_(list(arrays), op=hvd.Sum, name=name, process_set=self._sets.of_stage)

    def _square(self) -> mx.nd.NDArray:
        """Return the sums of squares of this stage's parameters, and zeros for the others."""
        device, count = self.runner.stage.device, len(self.names)
        if self._places is None:
            return mx.nd.zeros((count,), ctx=device, dtype=self.dtype)
        return mx.nd.scatter_nd(square_sums(self.updater.gradients), self._places, (count,))

    @property
    def dtype(self) -> Any:
        """That of the network, also on a stage that trains nothing."""
        return self._stages.dtype

    def update(self, number: int) -> float:
        """Make this stage's part of optimizer step ``number``; return its learning rate."""
        self._weights_here = self._state_here = False
        return super().update(number)

    def close(self) -> None:
        """Leave the neighbours."""
        self._link.close()

    def gather(self, *, state: bool = True) -> None:
        """Take every stage's weights, and state, from the rank of this replica that holds it; once after each step."""
        if self._sets.of_replica is None:
            return
        optimizer = self._whole.state_arrays() if state and not self._state_here else {}
        for stage in self._stages.stages:
            arrays = {} if self._weights_here else {name: one.data() for name, one in stage.parameters.items()}
            arrays |= {key: array for key, array in optimizer.items() if key.rpartition("/")[0] in stage.parameters}
            self._take(arrays, self._sets.rank_of(stage.index))
        self._weights_here, self._state_here = True, self._state_here or state

    def figures(self) -> dict[str, float]:
        """Return the bubble and the peaks of all ranks."""
        return _figures(self.group, {self._sets.stage: self.runner.timeline}, self._sets.stages)

    def _take(self, arrays: Mapping[str, mx.nd.NDArray], owner: int) -> None:
        """Replace arrays by those of the owner, through host memory."""
        host = {name: plain(array, mx.cpu()) for name, array in arrays.items()}
        for name in sorted(host):
            self._sets.hvd.broadcast_(
                host[name], root_rank=owner, name=f"mxdist.gather.{name}", process_set=self._sets.of_replica
            )
        for name, array in arrays.items():
            host[name].wait_to_read()
            if owner != self.group.rank:
                array[:] = host[name]

    def _squares_of_all(self, squares: mx.nd.NDArray) -> mx.nd.NDArray:
        if self._sets.of_replica is None:
            return squares
        if self._norm is not None:  # a stage that trains nothing has no other reason to wait for it
            self._norm.wait_to_read()
        hvd = self._sets.hvd
        self._norm = plain(squares.reshape((1,)).astype(self.dtype), mx.cpu())
        hvd.allreduce_(self._norm, op=hvd.Sum, name="mxdist.norm", process_set=self._sets.of_replica)
        return self._norm.as_in_context(squares.context)


class StageUpdate(Update):
    """The optimizer of one stage, with room for the state of the others.

    :param own: what is trained here, by name.
    :param every: the names of all trained parameters, of whichever stage, in the order of the layers.
    :param others: the weights that other ranks train.
    """

    def __init__(
        self,
        spec: Optimizer,
        own: Mapping[str, mx.gluon.Parameter],
        total: int,
        *,
        every: list[str],
        others: Mapping[str, mx.nd.NDArray],
    ) -> None:
        super().__init__(spec, own, total)
        self.every = every
        self._others = list(others)
        self._updates = 0
        first = len(self.names)
        self._foreign = [self._optimizer.create_state(first + i, weight) for i, weight in enumerate(others.values())]

    def apply(self, update: int) -> float:
        """Make optimizer step ``update``: the other ranks make theirs."""
        self._updates += 1
        return super().apply(update)

    def state_arrays(self) -> dict[str, mx.nd.NDArray]:
        """Return the optimizer's arrays of all stages; those of others are as old as the last ``gather``."""
        return super().state_arrays() | named_state(self._others, self._foreign)

    def counts(self) -> dict[str, int]:
        """Return how often each parameter of the network was updated: all as often."""
        return {name: self._updates for name in self.every}

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """Go on from these update counts, of the whole network.

        :raises CheckpointError: they belong to other parameters.
        """
        super().set_counts(counts)
        self._updates = max(counts.values(), default=0)


def stage_update(stages: Stages, own: int, spec: Optimizer, total: int) -> StageUpdate:
    """Return the optimizer of stage ``own``; the other stages' parameters lose their gradients here."""
    every = [name for stage in stages.stages for name in stage.trained]
    others: dict[str, mx.nd.NDArray] = {}
    for stage in stages.stages:
        if stage.index != own:
            others |= {name: parameter.data() for name, parameter in stage.trained.items()}
    trained = stages.stages[own].trained
    for stage in stages.stages:
        if stage.index != own:
            _drop_gradients(stage)
    return StageUpdate(spec, trained, total, every=every, others=others)


def _drop_gradients(stage: Stage) -> None:
    for parameter in stage.parameters.values():
        parameter.grad_req = "null"


def _figures(group: Group, timelines: Mapping[int, Timeline], stages: int) -> dict[str, float]:
    """Return what stages measured since the last call: the idle share over all, the peak of each over its replicas."""
    row = np.zeros((stages, 3))
    for index, timeline in timelines.items():
        row[index] = (timeline.busy, timeline.whole, timeline.peak)
        timeline.reset()
    table = group.gather(row.ravel().tolist()).reshape(group.size, stages, 3)
    busy, whole = float(table[:, :, 0].sum()), float(table[:, :, 1].sum())
    found: dict[str, Any] = {"pipeline_bubble": 1 - busy / whole if whole else 0.0}
    peaks = table[:, :, 2].max(axis=0)
    return found | {f"pipeline_peak_activations_{stage}": float(peak) for stage, peak in enumerate(peaks)}
