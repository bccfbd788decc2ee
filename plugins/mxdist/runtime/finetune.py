"""Starting from the weights of an earlier model: what is loaded, what is new, and what stays as it is.

Loading goes by standard names (``features.0.weight``). The head is the network's output layer. Freezing means: no
gradient, not given to the optimizer, and batch normalisation with the statistics it has. A rate of zero is no freezing,
since weight decay and running statistics go on (apache/mxnet#4163, #6223).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
from numpy.typing import NDArray

from mxdist.errors import NotFound, Problem, SpecError
from mxdist.runtime import network
from mxdist.runtime.checkpoint import unpack
from mxdist.spec import Head, Init, Storage, digest_of
from mxdist.store import open_store
from mxdist.tracking import models

_SHOWN = 5


@dataclass(frozen=True)
class Source:
    """An exported model, read and verified.

    :param about: its ``model.json``.
    """

    uri: str
    digest: str
    about: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Loaded:
    """What happened to each parameter: every one of the network is either loaded or new."""

    parent: str
    loaded: tuple[str, ...]
    skipped: tuple[str, ...]
    new: tuple[str, ...]

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def counts(self) -> dict[str, float]:
        """Return how many there are of each, as metrics."""
        return {f"init_{kind}": float(len(getattr(self, kind))) for kind in ("loaded", "skipped", "new")}


def read(uri: str, storage: Storage) -> Source:
    """Return the model at ``uri``, a folder of a run store, verified by its manifest.

    :raises SpecError: there is no model.
    :raises StoreError: it is damaged, or the store failed.
    """
    store = open_store(uri, endpoint_url=storage.endpoint_url, region=storage.region)
    with tempfile.TemporaryDirectory(prefix="mxdist-model-") as scratch:
        try:
            folder = models.exported(models.fetch(store, Path(scratch, "model")))
        except NotFound as error:
            problem = f"there is no model at {uri}: {error.message}"
            raise SpecError("The job", [Problem("init.model_uri", problem)]) from None
        about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        arrays = unpack((folder / "params.npz").read_bytes(), f"{uri}/params.npz")
        return Source(uri, models.digest(folder), about, arrays)


def load(net: mx.gluon.Block, init: Init, source: Source, *, labels: tuple[int, ...] | None) -> Loaded:
    """Load a model's parameters into an initialised network.

    :param labels: the label of each class of this job.
    :raises SpecError: it does not fit: another label map under the same head, or other shapes.
    """
    parameters, head = network.parameters(net), set(network.head(net))
    problems = [] if init.head is Head.REPLACE else _head_problems(init, source, labels, head)
    if init.head is Head.REPLACE and not head:
        problems.append(Problem("init.head", "this network has no output layer of its own: its weight is another's"))
    wanted = [name for name in parameters if init.head is Head.KEEP or name not in head]
    problems += _shape_problems(parameters, wanted, source)
    loaded = tuple(name for name in wanted if name in source.arrays)
    if not loaded:
        problems.append(Problem("init.model_uri", f"no parameter of {source.uri} has a name that this network knows"))
    if problems:
        raise SpecError("The job", problems)
    for name in loaded:
        parameters[name].set_data(mx.nd.array(source.arrays[name], dtype=parameters[name].dtype))
    return Loaded(
        parent=source.digest,
        loaded=loaded,
        skipped=tuple(name for name in source.arrays if name not in loaded),
        new=tuple(name for name in parameters if name not in loaded),
    )


def label_digest(labels: tuple[int, ...] | None) -> str:
    """Return the digest of a label map: which label each class stands for."""
    return digest_of(None if labels is None else list(labels))


def freeze(net: mx.gluon.Block, init: Init) -> tuple[str, ...]:
    """Freeze what ``init`` says, before the network is hybridized; return the names of all frozen parameters.

    :raises SpecError: an expression is wrong or matches nothing, or nothing is left to train.
    """
    parameters = network.parameters(net)
    chosen = _chosen(list(parameters), set(network.head(net)), init)
    for name, layer in network.layers(net):
        if network.is_batch_norm(layer) and _frozen_norm(name, layer, parameters, chosen):
            layer._kwargs["use_global_stats"] = True
            chosen |= {f"{name}.running_mean", f"{name}.running_var"}
    for name in chosen:
        parameters[name].grad_req = "null"
    if not network.trainable(net):
        raise SpecError("The job", [Problem("init.freeze", "nothing is left to train")])
    return tuple(name for name in parameters if name in chosen)


def _chosen(names: list[str], head: set[str], init: Init) -> set[str]:
    chosen = {name for name in names if init.freeze_backbone and name not in head}
    problems = []
    for index, expression in enumerate(init.freeze):
        try:
            matching = {name for name in names if re.search(expression, name)}
        except re.error as error:
            problems.append(Problem(f"init.freeze.{index}", f"{expression!r} is not a regular expression: {error}"))
            continue
        if not matching:
            problem = f"{expression!r} matches no parameter; there are {', '.join(names[:_SHOWN])}, ..."
            problems.append(Problem(f"init.freeze.{index}", problem))
        chosen |= matching
    if problems:
        raise SpecError("The job", problems)
    return chosen


def _frozen_norm(name: str, layer: mx.gluon.Block, parameters: Mapping[str, Any], chosen: set[str]) -> bool:
    """Return whether a batch normalisation is frozen: its statistics were named, or all it could learn is frozen."""
    own = {f"{name}.{key}" for key in layer._reg_params}
    learning = {key for key in own & set(parameters) if parameters[key].grad_req != "null"}
    return f"{name}.running_mean" in chosen or (bool(learning) and learning <= chosen)


def _head_problems(init: Init, source: Source, labels: tuple[int, ...] | None, head: set[str]) -> list[Problem]:
    problems = []
    theirs = source.about.get("label_digest")
    if not init.reuse_head and theirs != label_digest(labels):
        was, now = source.about.get("labels"), None if labels is None else list(labels)
        problem = f"its classes stand for the labels {was}, this job's for {now}"
        problem += "; replace the head, or set reuse_head on purpose"
        problems.append(Problem("init.head", problem))
    absent = sorted(head - set(source.arrays))
    if absent:
        problems.append(Problem("init.head", f"the model has no {', '.join(absent)} to keep; replace the head"))
    return problems


def _shape_problems(parameters: Mapping[str, Any], wanted: list[str], source: Source) -> list[Problem]:
    shapes = {
        name: (tuple(source.arrays[name].shape), tuple(parameters[name].shape))
        for name in wanted
        if name in source.arrays
    }
    return [
        Problem("init.model_uri", f"{name} has shape {theirs} there, {ours} here")
        for name, (theirs, ours) in shapes.items()
        if theirs != ours
    ][:_SHOWN]


def as_arrays(net: mx.gluon.Block) -> dict[str, NDArray[Any]]:
    """Return a network's parameters in host memory."""
    return {name: array.asnumpy() for name, array in network.arrays(net).items()}
