"""From a job to everything that its loop needs, on every rank the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.data.arrays import no_classes, not_finite, refuse
from mxdist.data.fetch import fetch
from mxdist.errors import DataError, Problem, SpecError
from mxdist.runtime import finetune, independence, network, normalisation
from mxdist.runtime.batches import Examples, steps_of
from mxdist.runtime.parallel.base import Group
from mxdist.runtime.parallel.pipeline import stage_update
from mxdist.runtime.parallel.servers import RemoteUpdate
from mxdist.runtime.parallel.stages import Stages
from mxdist.runtime.parallel.stages import build as build_stages
from mxdist.runtime.recipe import Recipe
from mxdist.runtime.update import Update
from mxdist.runtime.worker import Worker
from mxdist.spec import Dataset, TrainingJob
from mxdist.spec.parallelism import Lossy, Parallelism

_FEW = 2
_MEASURED_ROWS = 32
_HINT = "Set dataset.labels, or model.params.classes."


@dataclass(frozen=True)
class Setup:
    """What a training consists of.

    :param forward: from stored inputs to outputs.
    :param graph: the sum of the loss, hybridized: what training runs.
    :param labels: the label of each class; None if outputs are no classes.
    :param stages: of a network that is cut; None for one that is not.
    :param outputs: the width of the output.
    :param frozen: names of parameters that do not change.
    :param random: the network draws random numbers.
    """

    recipe: Recipe
    train: Examples
    validation: Examples | None
    net: mx.gluon.HybridBlock
    forward: network.Forward
    loss: mx.gluon.HybridBlock
    graph: network.LossSum
    update: Update
    stages: Stages | None
    labels: tuple[int, ...] | None
    outputs: int
    frozen: tuple[str, ...]
    random: bool
    steps: int


def build(job: TrainingJob, worker: Worker, group: Group) -> Setup:
    """Build the network with its initial weights, and fetch its data.

    Every rank starts from the same seed; that initial weights are the same on all does not rest on it: see
    ``loop.Trainer``, which broadcasts and compares them.
    """
    recipe, train, validation = _load(job, worker)
    network.reseed(job.seed, 0, 0)
    net = recipe.network()
    device = mx.cpu() if job.parallelism.staged else worker.devices[0]
    network.prepare(net, dtype=job.dtype, device=device)
    forward = network.Forward(recipe, net, dtype=job.dtype, stored=train.x.dtype.name, shape=train.x.shape[1:])
    loss = recipe.loss()
    outputs = _dry_run(forward, loss, train, device, job.dtype.value)
    if validation is not None:
        _check_shapes(forward, loss, train, validation, device, job.dtype.value)
    if job.parallelism.parts > 1:
        _check_rows_apart(forward, loss, train, device, job)
    frozen = finetune.freeze(net, job.init) if job.init else ()
    normalisation.settle(net, job.parallelism, group)
    if recipe.classifies:
        _check_labels(train, validation, outputs)
        _check_classes(outputs)
    stages = _cut(job, forward, loss, train, worker, group) if job.parallelism.staged else None
    forward = stages.forward if stages else forward
    steps = job.epochs * steps_of(len(train), job.batch_size)
    return Setup(
        recipe=recipe,
        train=train,
        validation=validation,
        net=net,
        forward=forward,
        loss=loss,
        graph=_graph(forward, loss, whole=stages is None),
        update=_update(job, net, stages, steps, group),
        stages=stages,
        labels=_labels(job, outputs) if recipe.classifies else None,
        outputs=outputs,
        frozen=frozen,
        random=_draws(forward, job.parallelism),
        steps=steps,
    )


def _load(job: TrainingJob, worker: Worker) -> tuple[Recipe, Examples, Examples | None]:
    """Return the recipe, which has learnt the classes, and the examples to train and to validate with."""
    if job.model is None or job.dataset is None:
        raise DataError("the job has no model or no dataset.")
    recipe, labels = Recipe(job.model), job.dataset.labels
    folder = fetch_dataset(job.dataset, job, worker)
    train = recipe.examples(folder, "train", labels)
    if train is None:
        raise DataError(f"dataset {job.dataset.manifest_uri} has no train split.")
    validation = recipe.examples(folder, "validation", labels)
    _check_values(recipe, [train, *([validation] if validation else [])], job)
    recipe.learn_classes(_classes(train, labels))
    return recipe, train, validation


def _graph(forward: network.Forward, loss: mx.gluon.HybridBlock, *, whole: bool) -> network.LossSum:
    """Return the sum of the loss; stages have graphs of their own."""
    graph = network.LossSum(forward, loss)
    if whole:
        graph.hybridize(static_alloc=True, static_shape=True)
    return graph


def _labels(job: TrainingJob, outputs: int) -> tuple[int, ...]:
    """Return the label of each output."""
    return (job.dataset.labels if job.dataset else None) or tuple(range(outputs))


def _draws(forward: network.Forward, parallelism: Parallelism) -> bool:
    """Return whether the network draws random numbers.

    :raises SpecError: each share of the work would draw its own, and the job does not say that it may.
    """
    operators = network.random_ops(forward(mx.sym.var("data")))
    _check_random(operators, parallelism)
    return bool(operators)


def _cut(
    job: TrainingJob,
    forward: network.Forward,
    loss: mx.gluon.HybridBlock,
    train: Examples,
    worker: Worker,
    group: Group,
) -> Stages:
    """Cut the network; the stages of other ranks stay in host memory."""
    layout = job.parallelism
    rows = min(max(job.batch_size // (layout.replicas * layout.micro_batches), 1), len(train), _MEASURED_ROWS)
    devices = worker.devices
    if layout.across_processes:
        own = group.rank % layout.stage_count
        devices = [worker.devices[0] if stage == own else mx.cpu() for stage in range(layout.stage_count)]
    x = mx.nd.array(train.x[:rows], dtype=train.x.dtype)
    return build_stages(layout, forward, loss, x, group=group, devices=devices)


def _update(job: TrainingJob, net: mx.gluon.HybridBlock, stages: Stages | None, steps: int, group: Group) -> Update:
    if stages is not None and job.parallelism.across_processes:
        return stage_update(stages, group.rank % len(stages), job.optimizer, steps)
    kind = RemoteUpdate if job.parallelism.servers_update else Update
    return kind(job.optimizer, network.trainable(net), steps)


def fetch_dataset(dataset: Dataset, job: Any, worker: Worker) -> Path:
    """Return the dataset's folder on this host; the ranks of a host share one cache, and verify it once a world."""
    scratch = worker.attempt_dir or Path.cwd()
    session = None if worker.world_dir is None else f"{scratch}/{worker.world_dir.name}"
    # Beside the attempts of all jobs: <workdir>/<job key>/<attempt>.
    cache = scratch.parents[1] / ".datasets" if len(scratch.parents) > 1 else scratch / ".datasets"
    with worker.busy(0):
        return fetch(dataset.manifest_uri, dataset.version, cache, storage=job.storage, session=session, hold=True)


def _check_values(recipe: Recipe, parts: list[Examples], job: TrainingJob) -> None:
    """Refuse values that training would stumble over, before there is a network to build.

    :raises DataError: with the first wrong row of every array.
    """
    labels = job.dataset.labels if job.dataset else None
    learnt = recipe.classes is None and labels is None
    dtype = job.dtype.value
    problems = []
    for part in parts:
        found = {"x": "" if recipe.fills_gaps else not_finite(part.x, dtype), "y": not_finite(part.y, dtype)}
        if recipe.classifies:
            found["y"] = found["y"] or no_classes(part.y, dtype, outputs=recipe.outputs, learnt=learnt)
        problems += [f"{name} of the {part.split} split {problem}" for name, problem in found.items() if problem]
    refuse(problems, _HINT if any("the label" in problem for problem in problems) else "")


def _classes(train: Examples, labels: tuple[int, ...] | None) -> int:
    if labels is not None:
        return len(labels)
    return int(train.y.max()) + 1 if np.issubdtype(train.y.dtype, np.integer) else 1


def _dry_run(
    forward: network.Forward, loss: mx.gluon.HybridBlock, train: Examples, device: mx.Context, dtype: str
) -> int:
    """Give every parameter its shape and first value, before anything is loaded or broadcast; return the outputs."""
    x = mx.nd.array(train.x[:_FEW], ctx=device, dtype=train.x.dtype)
    y = mx.nd.array(train.y[:_FEW], ctx=device, dtype=dtype)
    try:
        network.check_loss(forward, loss, x, y)
    except mx.base.MXNetError as error:
        said = next(
            (line for line in str(error).splitlines() if "Error:" in line or "Check failed" in line), str(error)
        )
        problem = (
            f"the network cannot take {_FEW} examples of shape {train.x.shape[1:]} in {dtype}: {said.strip()[:300]}"
        )
        raise SpecError("The job", [Problem("model", problem)]) from error
    return int(np.prod(forward(x).shape[1:]))


def _check_shapes(
    forward: network.Forward,
    loss: mx.gluon.HybridBlock,
    train: Examples,
    validation: Examples,
    device: mx.Context,
    dtype: str,
) -> None:
    """Refuse a validation split that the network cannot take: else the first epoch would be trained in vain.

    :raises DataError: its examples have another shape than those of the train split, and do not fit.
    """
    if (validation.x.shape[1:], validation.y.shape[1:]) == (train.x.shape[1:], train.y.shape[1:]):
        return
    x = mx.nd.array(validation.x[:_FEW], ctx=device, dtype=validation.x.dtype)
    y = mx.nd.array(validation.y[:_FEW], ctx=device, dtype=dtype)
    try:
        network.check_loss(forward, loss, x, y)
        mx.nd.waitall()
    except (mx.base.MXNetError, SpecError, ValueError) as error:  # ValueError: of a loss that reshapes
        shapes = [f"{part.x.shape[1:]} with labels of shape {part.y.shape[1:]}" for part in (train, validation)]
        raise DataError(
            f"the network takes examples of the train split, {shapes[0]}, but not those of the validation split, "
            f"{shapes[1]}.",
            hint="Give the examples of both splits the same shape.",
        ) from error


def _check_rows_apart(
    forward: network.Forward, loss: mx.gluon.HybridBlock, train: Examples, device: mx.Context, job: TrainingJob
) -> None:
    """Refuse rows that influence each other, other than through Gluon's BatchNorm: parts of a batch would train
    another model than the whole batch does.

    :raises SpecError: naming the operators, where they are known.
    """
    chosen = [0, len(train) // 2] if len(train) > 1 else [0]
    x = mx.nd.array(train.x[chosen], ctx=device, dtype=train.x.dtype)
    y = mx.nd.array(train.y[chosen], ctx=device, dtype=job.dtype.value)
    found = independence.row_mixers(forward, loss, x, y)
    if found:
        problem = (
            f"rows of a batch influence each other ({found}), so a batch that is computed in {job.parallelism.parts} "
            "parts trains another model than one process does; use Gluon's BatchNorm layer, whose statistics can be "
            "synchronised, let each row stand alone, or train with one rank on one device"
        )
        raise SpecError("The job", [Problem("model", problem)])


def _check_random(operators: list[str], parallelism: Parallelism) -> None:
    """Refuse random layers where each share draws numbers of its own, unless the job says that it may.

    :raises SpecError: it does not say so.
    """
    parts = parallelism.parts
    if operators and parts > 1 and Lossy.DROPOUT not in parallelism.lossy:
        problem = (
            f"the network draws random numbers ({', '.join(operators)}), others for each of {parts} parts of "
            "the work, so it trains another model than one process does; add dropout to lossy if that is meant, take "
            "these layers out, or train with one rank on one device"
        )
        raise SpecError("The job", [Problem("parallelism.lossy", problem)])


def _check_classes(outputs: int) -> None:
    """Refuse one class: its probability is 1 whatever the weights are, so nothing could be learnt."""
    if outputs < 2:
        raise DataError("there is one class only, so there is nothing to learn.", hint=f"Check the labels. {_HINT}")


def _check_labels(train: Examples, validation: Examples | None, outputs: int) -> None:
    """Refuse labels that the network has no output for: MXNet's loss would take the last output instead."""
    for examples in (train, validation):
        if examples is not None and not (0 <= int(examples.y.min()) and int(examples.y.max()) < outputs):
            raise DataError(
                f"labels of the {examples.split} split go from {examples.y.min()} to {examples.y.max()}, "
                f"but the network has {outputs} outputs.",
                hint=_HINT,
            )
