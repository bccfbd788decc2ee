"""One rank of a loop that was changed on purpose: ``python mutant.py NAME``.

Names that end in ``+unchecked`` also switch off the comparison of parameters between ranks, to see whether the law's
own test finds the fault.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.runtime import batches, loop, network, normalisation, rank, step, update
from mxdist.runtime.parallel import AllReduce, Group, layout, links, pipeline, runner, servers, shared

RANK = int(os.environ["HOROVOD_RANK"])
_SLOW_S = 0.25


def nothing() -> None:
    """Break nothing: the law must hold, or the harness is at fault."""


def no_averaging() -> None:
    """Never reduce gradients."""
    AllReduce.sum_ = lambda self, arrays: None
    servers.Served.reduce = lambda self: None


def no_shared_sum() -> None:
    """Never sum in shared memory."""
    shared.SharedSum.sum_ = lambda self: None


def stale_pull() -> None:
    """Train with the sum that the servers had one step before."""
    reduce_ = servers.Served.reduce

    def reduce_late(self: servers.Served) -> None:
        reduce_(self)
        now = [gradient.copy() for gradient in self.updater.gradients]
        for gradient, before in zip(self.updater.gradients, vars(self).get("before", now), strict=True):
            gradient[:] = before
        vars(self)["before"] = now

    servers.Served.reduce = reduce_late


def gradients_kept() -> None:
    """Break nothing, but keep the weights that each step began with, and its gradient over all ranks."""
    update_ = layout.Layout.update

    def keep(self: layout.Layout, number: int) -> float:
        names, updater = self.updater.names, self.updater
        arrays = {f"weight/{name}": array.asnumpy() for name, array in zip(names, updater.weights, strict=True)}
        arrays |= {f"gradient/{name}": array.asnumpy() for name, array in zip(names, updater.gradients, strict=True)}
        np.savez(Path(os.environ["MXDIST_WORLD_DIR"]) / f"step-{number}-rank-{RANK}.npz", **arrays)
        return update_(self, number)

    layout.Layout.update = keep


def clip_before_reduce() -> None:
    """Clip each rank's own gradient instead of the mean of all."""
    clip = update.clip

    def clipped(reduce_: Callable[[Any], None]) -> Callable[[Any], None]:
        def reduce(self: layout.Layout) -> None:
            clip(self.updater.gradients, self.updater._spec.clip_norm)
            reduce_(self)

        return reduce

    layout.Layout.reduce = clipped(layout.Layout.reduce)
    servers.Served.reduce = clipped(servers.Served.reduce)
    update.clip = lambda gradients, largest, meet=None: None


def doubled_updates() -> None:
    """Double every gradient after it was reduced."""
    update_ = layout.Layout.update

    def twice(self: layout.Layout, number: int) -> float:
        for gradient in self.updater.gradients:
            gradient *= 2
        return update_(self, number)

    layout.Layout.update = twice


def wrong_weight_for_last_batch() -> None:
    """Divide by the batch size, not by the number of examples that were there."""
    weight = layout.Layout.weight
    layout.Layout.weight = lambda self, total, device: weight(self, 8, device)


def data_repeated() -> None:
    """Give every rank the first rank's share."""
    share = batches.share
    batches.share = lambda total, rank, size: share(total, 0, size)


def no_broadcast() -> None:
    """Start each rank from weights of its own seed."""
    broadcast, reseed = AllReduce.broadcast_, network.reseed

    def only_bytes(self: AllReduce, arrays: Mapping[str, mx.nd.NDArray]) -> None:
        broadcast(self, {name: array for name, array in arrays.items() if name.startswith("bytes.")})

    AllReduce.broadcast_ = only_bytes
    network.reseed = lambda seed, rank, step: reseed(seed + RANK, rank, step)


def seeds_differ() -> None:
    """Seed each rank by its number; that alone must not matter, since rank 0's weights are broadcast."""
    reseed = network.reseed
    network.reseed = lambda seed, rank, step: reseed(seed + RANK, rank, step)


def drift() -> None:
    """Change one bit on rank 1 in the middle of the first epoch."""
    make = step.Step.make

    def bend(self: step.Step, batch: Any, number: int) -> Any:
        trace = make(self, batch, number)
        if number == 3 and RANK == 1:
            weight = self._layout.updater.weights[0]
            values = weight.asnumpy()
            values.reshape(-1)[0] = np.nextafter(values.reshape(-1)[0], np.inf)
            weight[:] = mx.nd.array(values, dtype=values.dtype)
        return trace

    step.Step.make = bend


def patient() -> None:
    """Wait for every checkpoint: no fault, but a slow disk then skips none, so a test can count on each."""
    save = loop.Trainer._save

    def save_and_wait(self: loop.Trainer) -> None:
        save(self)
        assert self._saver is None or self._saver.drain(120)

    loop.Trainer._save = save_and_wait


def local_statistics() -> None:
    """Take the statistics of BatchNorm from each rank's own rows, whatever the job says."""
    normalisation.synchronise = lambda net, group: None


def stage_not_updated() -> None:
    """Let the rank of the second stage keep its weights."""
    apply = update.Update.apply

    def forget(self: update.Update, number: int) -> float:
        if RANK == 1:
            for gradient in self.gradients:
                gradient[:] = 0
        return apply(self, number)

    update.Update.apply = forget


def nan_in_the_last_stage() -> None:
    """Spoil one gradient on the second rank at step 5."""
    run, count = runner.Runner.run, itertools.count(1)

    def spoil(self: runner.Runner, batch: Any) -> Any:
        loss = run(self, batch)
        if next(count) == 5 and RANK == 1:
            self.stage.parameters["output.weight"].grad()[:] = np.nan
        return loss

    runner.Runner.run = spoil


def stale_activation() -> None:
    """Let a rank compute with what came for the micro-batch before."""
    receive = links.Ways.receive

    def earlier(self: links.Ways) -> mx.nd.NDArray:
        now = receive(self)
        before, self.before = getattr(self, "before", now), now.copy()
        return before.copy() if before.shape == now.shape else now

    links.Ways.receive = earlier


def message_not_written() -> None:
    """Say that a message is in the memory of its receiver when an older one still is."""
    slot = links.Beside._slot

    def elsewhere(self: links.Beside, memory: Any, number: int, shape: Any) -> Any:
        found = slot(self, memory, number, shape)
        return found.copy() if memory is self._neighbour.outbox and number > 10 else found

    links.Beside._slot = elsewhere


def micro_batch_repeated() -> None:
    """Let every micro-batch have the first one's rows."""
    runner.divide = lambda rows, parts: [slice(0, max(rows // parts, 1))] * min(rows, parts)


def norm_of_one_stage() -> None:
    """Clip each stage by the norm of its own gradient."""
    pipeline.RankStages._squares_of_all = lambda self, squares: squares


def stage_not_summed() -> None:
    """Never sum the gradients of the second stage over its replicas."""
    reduce_ = pipeline.RankStages.reduce

    def reduce_others(self: pipeline.RankStages) -> None:
        if self._sets.stage != 1:
            reduce_(self)

    pipeline.RankStages.reduce = reduce_others


def share_of_the_first_replica() -> None:
    """Let every replica read the first one's rows."""
    pipeline.RankStages.data_rank = property(lambda self: 0)


def gathered_from_another_stage() -> None:
    """Take each of two stages from the rank that holds the other one, where it is old."""
    take = pipeline.RankStages._take
    pipeline.RankStages._take = lambda self, arrays, owner: take(self, arrays, owner ^ 1)


def recorded() -> None:
    """Break nothing; write down when this rank's stage was at work, one line a step."""
    run = runner.Runner.run
    file = os.path.join(os.environ["MXDIST_WORLD_DIR"], f"spans-{RANK}.jsonl")

    def record(self: runner.Runner, batch: Any) -> Any:
        loss = run(self, batch)
        with open(file, "a") as out:
            out.write(json.dumps(self.timeline.spans) + "\n")
        return loss

    runner.Runner.run = record


def in_turn() -> None:
    """Let a stage begin when the other has nothing more to do: one micro-batch, whatever the job says."""
    runner.divide = lambda rows, parts: layout.divide(rows, 1)


def slow_computing_on_rank_1() -> None:
    """Break nothing; one rank's device is slower than the others'."""
    backward = layout.Whole.backward

    def slowly(self: layout.Whole, batch: Any) -> Any:
        loss = backward(self, batch)
        if RANK == 1:
            mx.nd.waitall()
            time.sleep(_SLOW_S)
        return loss

    layout.Whole.backward = slowly


def slow_data_on_rank_1() -> None:
    """Break nothing; one rank's data come slowly."""
    batches_ = batches.Feed.batches

    def slowly(self: batches.Feed, *arguments: Any) -> Any:
        for batch in batches_(self, *arguments):
            if RANK == 1:
                time.sleep(_SLOW_S)
            yield batch

    batches.Feed.batches = slowly


def unchecked() -> None:
    """Believe that all ranks hold the same parameters."""
    Group.check_equal = lambda self, arrays, where: ""


MUTATIONS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        nothing,
        no_averaging,
        no_shared_sum,
        stale_pull,
        gradients_kept,
        clip_before_reduce,
        doubled_updates,
        wrong_weight_for_last_batch,
        data_repeated,
        no_broadcast,
        seeds_differ,
        drift,
        patient,
        local_statistics,
        stage_not_updated,
        nan_in_the_last_stage,
        stale_activation,
        message_not_written,
        micro_batch_repeated,
        norm_of_one_stage,
        stage_not_summed,
        share_of_the_first_replica,
        gathered_from_another_stage,
        recorded,
        in_turn,
        slow_computing_on_rank_1,
        slow_data_on_rank_1,
        unchecked,
    )
}

if __name__ == "__main__":
    for name in sys.argv[1].split("+"):
        MUTATIONS[name]()
    rank.main()
