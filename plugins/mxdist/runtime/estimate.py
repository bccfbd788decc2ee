"""The memory that a job will need, rank by rank: ``python -m mxdist.runtime.estimate JOB.json CACHE``.

The network is built as a graph and never gets values; shapes are inferred, and ``liveness`` walks what training would
run. The dataset is fetched into the host's cache, as the job itself would, because the shape of an example is there.

Two terms are measured, not derived. The *base* is the resident memory of this very process once it has imported what a
rank imports (MXNet and Horovod's binding). The *workspace* is what oneDNN needs beside the tensors: a convolution's
weight and its gradient in layouts of its own and one reordered copy, so three times the largest one; of a matrix
product, one copy.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mxnet as mx

from mxdist.data.fetch import fetch
from mxdist.errors import DataError, MxdistError
from mxdist.runtime import finetune, network
from mxdist.runtime.batches import Examples, chunk_steps
from mxdist.runtime.liveness import Graph
from mxdist.runtime.parallel import partition
from mxdist.runtime.parallel.stages import LastGraph, StageGraph
from mxdist.runtime.recipe import Recipe
from mxdist.spec import OptimizerName, TrainingJob, parse_job
from mxdist.spec.parallelism import Balance, Inside, PipelineSchedule, Strategy

Shape = tuple[int, ...]
_WORKSPACE = {"Convolution": 3, "Deconvolution": 3, "FullyConnected": 1, "dot": 1}
_COPIES = 2
"""Of a checkpoint, in memory while it is written: the snapshot, and the bytes of the file. One more while the next
snapshot waits, which is so when the run store is slower than the steps between two saves."""


@dataclass(frozen=True)
class Stage:
    """One part of the network, or all of it, on one device; in bytes but for ``count``.

    :param count: numbers in its parameters, running statistics among them.
    :param kept: activations kept for the backward pass, of all micro-batches that are held at once.
    :param working: what lives beside them at the worst moment: gradients of activations, oneDNN's workspace.
    """

    stage: int
    device: int
    count: int
    parameters: int
    gradients: int
    optimizer: int
    kept: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.kept + self.working


@dataclass(frozen=True)
class Rank:
    """What one process holds, in bytes.

    :param stages: of this rank, each on its device.
    :param elsewhere: host copies of the parameters and optimizer state of other ranks' stages.
    :param inputs: the examples that are on their way, and those of the split that stay in memory.
    :param exchange: Horovod's fusion buffer, or the buffers of the parameter servers' store.
    :param checkpoint: copies while one is written; rank 0 alone.
    :param base: the process before it builds anything.
    """

    rank: int
    stages: tuple[Stage, ...]
    elsewhere: int
    inputs: int
    exchange: int
    checkpoint: int
    base: int

    @property
    def peak(self) -> int:
        """The most that this process holds at once."""
        beside = self.elsewhere + self.inputs + self.exchange + self.checkpoint + self.base
        return beside + sum(stage.total for stage in self.stages)


@dataclass(frozen=True)
class Estimate:
    """The memory of a job.

    :param checkpoint: bytes of one, on disk.
    :param notes: what the figures leave out.
    """

    ranks: tuple[Rank, ...]
    checkpoint: int
    notes: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values, sums among them."""
        ranks = [{**asdict(rank), "peak": rank.peak} for rank in self.ranks]
        return {"ranks": ranks, "checkpoint": self.checkpoint, "notes": list(self.notes)}


class Unbuilt:
    """A network without values.

    :param train: examples as stored; only their shapes count.
    :ivar shapes: of every parameter, by its own name.
    """

    def __init__(self, job: TrainingJob, train: Examples) -> None:
        if job.model is None:
            raise DataError("a script's memory cannot be estimated: its network is not known.")
        self.job, self.train = job, train
        self.itemsize = 8 if job.dtype.value == "float64" else 4
        recipe = Recipe(job.model)
        recipe.learn_classes(_classes(job, train))
        self.net = recipe.network()
        self.net.cast(job.dtype.value)
        if job.init:
            finetune.freeze(self.net, job.init)
        self.loss = recipe.loss()
        shape, stored = train.x.shape[1:], train.x.dtype.name
        self.forward = network.Forward(recipe, self.net, dtype=job.dtype, stored=stored, shape=shape)
        graph = Graph(network.LossSum(self.forward, self.loss)(*_inputs()), self.given(1), self.itemsize)
        self.shapes = graph.shapes

    def given(self, rows: int) -> dict[str, Shape]:
        """Return the shapes of inputs and targets."""
        return {"data": (rows, *self.train.x.shape[1:]), "targets": (rows, *self.train.y.shape[1:])}

    def bytes_of(self, parameters: Sequence[mx.gluon.Parameter]) -> int:
        """Return the size of some parameters."""
        return sum(math.prod(self.shapes[p.name]) for p in parameters if p.name in self.shapes) * self.itemsize

    def parts(self) -> list[tuple[Graph, list[mx.gluon.Parameter], set[str]]]:
        """Return each stage's training graph for one micro-batch, its parameters, and what has gradients."""
        job = self.job
        rows = _rows(job)
        if not job.parallelism.staged:
            own = list(network.parameters(self.net).values())
            graph = Graph(network.LossSum(self.forward, self.loss)(*_inputs()), self.given(rows), self.itemsize)
            return [(graph, own, _trained(own))]
        return self._stages(rows)

    def _stages(self, rows: int) -> list[tuple[Graph, list[mx.gluon.Parameter], set[str]]]:
        layers = partition.layers_of(self.net)
        begins = partition.begin(layers, self.job.parallelism, self._costs(layers))
        found = []
        shape: Shape = self.given(rows)["data"]
        for start, end in zip(begins, [*begins[1:], len(layers)], strict=True):
            part = layers[start:end]
            stage = StageGraph(part, self.forward.inputs, first=start == 0)
            stored = start > 0 and any(layer.takes_inputs for layer in part)
            x, y = mx.sym.var("x"), mx.sym.var("targets")
            given = {"x": shape} | ({"data": self.given(rows)["data"]} if stored else {})
            more = (mx.sym.var("data"),) if stored else ()
            if end == len(layers):
                symbol = LastGraph(stage, self.loss)(x, y, *more)
                given["targets"] = self.given(rows)["targets"]
            else:
                symbol = stage(x, *more)
            graph = Graph(symbol, given, self.itemsize)
            own = list(partition.names_of(self.net, part).values())
            found.append((graph, own, _trained(own) | ({"x"} if start else set())))
            shape = graph.outputs[0]
        return found

    def _costs(self, layers: Sequence[partition.Layer]) -> list[float]:
        if self.job.parallelism.balance is not Balance.ACTIVATIONS:
            return [float(self.bytes_of(list(layer.block.collect_params().values()))) for layer in layers]
        costs, shape = [], self.given(1)["data"]
        inputs = shape
        for layer in layers:
            given = {"x": shape} | ({"inputs": inputs} if layer.takes_inputs else {})
            graph = Graph(layer(mx.sym.var("x"), mx.sym.var("inputs")), given, self.itemsize)
            computed = [
                sum(sizes) for node, sizes in zip(graph.nodes, graph.sizes, strict=True) if node["op"] != "null"
            ]
            costs.append(float(sum(computed)))
            shape = graph.outputs[0]
        return costs


class Assembly:
    """Puts stages into ranks.

    :param base: bytes of a process before it builds anything.
    """

    def __init__(self, unbuilt: Unbuilt, base: int) -> None:
        self._job, self._net, self._base = unbuilt.job, unbuilt, base
        self._layout = unbuilt.job.parallelism
        optimizer = self._job.optimizer
        self._states = 2 if optimizer.name is OptimizerName.ADAM else 1 if optimizer.momentum else 0
        self._stages = [self._stage(number, *part) for number, part in enumerate(unbuilt.parts())]

    def estimate(self) -> Estimate:
        """Return the memory of all ranks."""
        checkpoint = sum(stage.parameters + stage.optimizer for stage in self._stages)
        ranks = tuple(self._rank(number, checkpoint) for number in range(self._layout.world_size))
        return Estimate(ranks, checkpoint, tuple(self._notes()))

    def _stage(self, number: int, graph: Graph, own: list[mx.gluon.Parameter], trained: set[str]) -> Stage:
        memory = graph.memory(trained)
        learning = [parameter for parameter in own if parameter.grad_req != "null"]
        parameters = self._net.bytes_of(own)
        gradients = self._net.bytes_of(learning)
        live = self._live(number)
        return Stage(
            stage=number,
            device=0 if self._layout.across_processes else number,
            count=parameters // self._net.itemsize,
            parameters=parameters,
            gradients=gradients,
            optimizer=self._states * gradients,
            kept=live * memory.kept,
            working=memory.peak - memory.kept + workspace(graph, self._net.itemsize),
        )

    def _live(self, stage: int) -> int:
        """Return how many micro-batches a stage holds at most."""
        layout = self._layout
        if layout.schedule is PipelineSchedule.GPIPE:
            return layout.micro_batches
        return min(layout.micro_batches, layout.stage_count - stage)

    def _rank(self, number: int, checkpoint: int) -> Rank:
        layout, stages, elsewhere = self._layout, tuple(self._stages), 0
        if layout.across_processes:
            own = number % layout.stage_count
            elsewhere = sum(stage.parameters + stage.optimizer for stage in stages if stage.stage != own)
            stages = (stages[own],)
        elif layout.strategy is Strategy.DEVICES or layout.inside is Inside.DEVICES:
            copies = [replace(stages[0], device=device, optimizer=0) for device in range(1, layout.devices_per_rank)]
            stages = (stages[0], *copies)
        gradients = stages[0].gradients
        exchange = min(gradients, layout.fusion_threshold_mb << 20) if layout.replicas > 1 else 0
        if layout.strategy is Strategy.PARAMETER_SERVER:
            exchange = gradients
        return Rank(
            rank=number,
            stages=stages,
            elsewhere=elsewhere,
            inputs=self._inputs(),
            exchange=exchange,
            checkpoint=(_COPIES + self._saves_again()) * checkpoint if number == 0 else 0,
            base=self._base,
        )

    def _saves_again(self) -> bool:
        """Return whether there is a second save."""
        return self._job.checkpoints.every_steps is not None or self._job.epochs > 1

    def _inputs(self) -> int:
        """Return the bytes of two chunks of steps, on the device and before, and of the split itself."""
        train = self._net.train
        rows = -(-self._job.batch_size // self._layout.replicas)
        row = train.x[:1].nbytes
        steps = min(chunk_steps(row, rows), -(-len(train) // self._job.batch_size))
        return 2 * steps * rows * row + train.x.nbytes + train.y.nbytes

    def _notes(self) -> list[str]:
        notes = []
        if self._layout.staged and self._layout.balance is Balance.TIME and not self._layout.cuts:
            notes.append("stages are measured when the job starts; here they are cut by parameters")
        if self._layout.batch_norm is not None and self._layout.batch_norm.value == "synchronised":
            notes.append("with synchronised BatchNorm the network runs layer by layer, which keeps somewhat more")
        return notes


def workspace(graph: Graph, itemsize: int) -> int:
    """Return the bytes that oneDNN needs beside the tensors of a graph: see above."""
    largest = 0
    for number, node in enumerate(graph.nodes):
        times = _WORKSPACE.get(node["op"], 0)
        for source, _ in graph.sources(number)[1:2] if times else []:
            shape = graph.shapes.get(graph.nodes[source]["name"], ())
            largest = max(largest, times * math.prod(shape) * itemsize)
    return largest


def resident(name: str) -> int:
    """Return a line of this process's ``/proc/self/status`` in bytes: ``VmRSS`` now, ``VmHWM`` at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _inputs() -> tuple[mx.sym.Symbol, mx.sym.Symbol]:
    return mx.sym.var("data"), mx.sym.var("targets")


def _trained(parameters: Sequence[mx.gluon.Parameter]) -> set[str]:
    return {parameter.name for parameter in parameters if parameter.grad_req != "null"}


def _rows(job: TrainingJob) -> int:
    """Return the most rows that one graph sees at once."""
    layout = job.parallelism
    rows = -(-job.batch_size // layout.replicas)
    devices = layout.devices or 1
    for parts in (devices, layout.accumulate, layout.micro_batches):
        rows = -(-rows // parts)
    return rows


def _classes(job: TrainingJob, train: Examples) -> int:
    if job.dataset is not None and job.dataset.labels is not None:
        return len(job.dataset.labels)
    return int(train.y.max()) + 1 if train.y.dtype.kind in "iu" else 1


def main(arguments: Sequence[str]) -> int:
    """Print the estimate of a job as JSON."""
    import horovod.mxnet  # noqa: F401  # part of the base

    from mxdist.runtime import loop  # noqa: F401  # as well

    try:
        job = parse_job(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
        if not isinstance(job, TrainingJob) or job.model is None or job.dataset is None:
            raise DataError("only a training of mxdist's own loop has a memory that can be estimated.")
        base = resident("VmRSS")
        named = job.dataset.manifest_uri, job.dataset.version
        folder = fetch(*named, Path(arguments[1]), storage=job.storage, hold=True)
        train = Recipe(job.model).examples(folder, "train", job.dataset.labels)
        if train is None:
            raise DataError(f"dataset {job.dataset.manifest_uri} has no train split.")
        found: Mapping[str, Any] = Assembly(Unbuilt(job.effective(), train), base).estimate().to_document()
    except MxdistError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
        return error.exit_code
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
