"""From a job's ``parallelism`` to the layout that its ranks train with."""

from __future__ import annotations

from math import ceil

from mxdist.runtime.parallel.base import Group
from mxdist.runtime.parallel.devices import Devices
from mxdist.runtime.parallel.half import HalfSum
from mxdist.runtime.parallel.layout import Layout, Whole
from mxdist.runtime.parallel.links import Sets, between
from mxdist.runtime.parallel.pipeline import DeviceStages, RankStages, StageUpdate
from mxdist.runtime.parallel.servers import Free, RemoteUpdate, Served
from mxdist.runtime.parallel.shared import SharedSum
from mxdist.runtime.setup import Setup
from mxdist.runtime.worker import Worker
from mxdist.spec import TrainingJob
from mxdist.spec.parallelism import Compression, Inside, Strategy


def choose(job: TrainingJob, setup: Setup, group: Group, worker: Worker) -> Layout:
    """Return how this rank computes its gradients."""
    layout = _layout(job, setup, group, worker)
    if job.parallelism.compression is Compression.FP16:
        layout.half = HalfSum()
    return layout


def _layout(job: TrainingJob, setup: Setup, group: Group, worker: Worker) -> Layout:
    wanted = job.parallelism
    if wanted.strategy is Strategy.DEVICES or wanted.inside is Inside.DEVICES:
        return Devices(setup.graph, setup.net, setup.update, group, worker.devices)
    if isinstance(setup.update, RemoteUpdate):
        return Free(setup.graph, setup.update, group, worker.devices[0], wanted)
    if wanted.strategy is Strategy.PARAMETER_SERVER:
        return Served(setup.graph, setup.update, group, worker.devices[0], wanted)
    if setup.stages is not None and isinstance(setup.update, StageUpdate):
        sets = Sets(group, wanted.replicas, wanted.stage_count)
        rows = ceil(ceil(job.batch_size / wanted.replicas) / wanted.micro_batches)
        beside = worker.waits_for if wanted.shared_memory_mb is not None else None
        link = between(sets, setup.stages, group, slots=wanted.micro_batches, rows=rows, waiting=beside)
        return RankStages(setup.stages, setup.update, group, sets, link, wanted)
    if setup.stages is not None:
        return DeviceStages(setup.stages, setup.update, group, wanted)
    shared = None
    if wanted.compression is Compression.NONE:
        shared = SharedSum.join(setup.update, group, wanted.shared_memory_mb, worker.waits_for)
    return Whole(setup.graph, setup.update, group, worker.devices[0], wanted.accumulate, shared)
