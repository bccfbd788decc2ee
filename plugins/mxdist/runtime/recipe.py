"""What to train: one of mxdist's networks, or a user's recipe.

A recipe is a Python module. Only the first function is needed::

    def network(params):                  # a HybridBlock; params: the job's model.params, and "classes"
    def data(folder, split, params):      # (x, y) arrays of "train", "validation" or "test"; None: no such split
    def preprocess(F, x, params):         # on the device, in the network's precision; part of the exported model
    def loss(params):                     # a HybridBlock: (output, label) -> one value for each example
    def metrics(params):                  # {"name": function(F, output, label) -> one value for each example}

Without ``data``, the arrays ``<split>/x.npy`` and ``<split>/y.npy`` are read. Without ``preprocess``, uint8 is scaled
to 0..1 and all else is taken as it is. Without ``loss``, it is softmax cross entropy, with accuracy as a metric.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from mxdist.data.split import load_split
from mxdist.errors import DataError, Problem, SpecError
from mxdist.runtime import models
from mxdist.runtime.batches import Examples
from mxdist.spec import Model
from mxdist.spec.networks import CATALOGUE, Inputs, Network

Metric = Callable[[Any, Any, Any], Any]
"""``metric(F, output, label)`` returns one value for each example; their mean over all examples is the metric."""

_FUNCTIONS = {
    "network": ("params",),
    "data": ("folder", "split", "params"),
    "preprocess": ("F", "x", "params"),
    "loss": ("params",),
    "metrics": ("params",),
}
_ON_DEVICE = {"float16", "float32", "float64", "uint8", "int8", "int32", "int64"}


class Recipe:
    """What a job's ``model`` means.

    :param model: the job's.
    """

    def __init__(self, model: Model) -> None:
        self.name = model.name or str(model.recipe)
        self._builtin = model.name
        self._params: dict[str, Any] = dict(model.params)
        self._module = None if model.recipe is None else _load(model.recipe)

    @property
    def params(self) -> dict[str, Any]:
        """Return the hyperparameters, with what was learnt from the data."""
        return dict(self._params)

    def examples(self, folder: Path, split: str, labels: tuple[int, ...] | None) -> Examples | None:
        """Return one split of the dataset in ``folder``, or None if there is no such split.

        :raises DataError: it is empty, or does not fit.
        """
        own = self._function("data")
        if not own and not (folder / split).is_dir():
            return None
        found = own(folder, split, self.params) if own else load_split(folder, split, labels)
        if found is None:
            return None
        x, y = self._pair(found, split)
        if self._builtin is not None:
            x, y = models.fit(self._builtin, self._params, x, y, _channels_first(x.shape[1:]), split)
        Examples(x, y, split)  # before a cast that would drop an imaginary part
        return Examples(x if x.dtype.name in _ON_DEVICE else x.astype(np.float32), y, split)

    def _pair(self, found: Any, split: str) -> tuple[NDArray[Any], NDArray[Any]]:
        try:
            x, y = found
        except (TypeError, ValueError):
            what = f"data() of {self.name} returned {type(found).__name__} for the {split} split, not (x, y)."
            raise DataError(what) from None
        return np.asanyarray(x), np.asanyarray(y)

    @property
    def fills_gaps(self) -> bool:
        """Whether inputs may hold NaN: only a ``preprocess`` of the recipe's own could deal with them."""
        return self._function("preprocess") is not None

    @property
    def classes(self) -> int | None:
        """The number of classes that the job gives, if it gives one."""
        given = self._params.get("classes")
        return given if type(given) is int and given > 0 else None

    @property
    def outputs(self) -> int | None:
        """The number of outputs, if it is known before the network is there: not for a network of the recipe's own."""
        return self.classes if self._builtin else None

    def learn_classes(self, count: int) -> None:
        """Set the parameter ``classes`` unless the job gives it."""
        if self._about is None or self._about.classifies:
            self._params.setdefault("classes", count)

    def network(self) -> mx.gluon.HybridBlock:
        """Return a new network.

        :raises SpecError: the recipe's is not a HybridBlock.
        """
        if self._builtin is not None:
            return models.build(self._builtin, self._params)
        function = self._function("network")
        net = function(self.params) if function else None
        if not isinstance(net, mx.gluon.HybridBlock):
            problem = f"network() of {self.name} returned {type(net).__name__}, not a HybridBlock"
            raise SpecError("The job", [Problem("model.recipe", problem)])
        return net

    def loss(self) -> mx.gluon.HybridBlock:
        """Return the loss: a HybridBlock that gives one value for each example."""
        own = self._function("loss")
        if own:
            return own(self.params)
        if self.classifies:
            return mx.gluon.loss.SoftmaxCrossEntropyLoss()
        return models.TokenLoss(self._params.get("pad_id"))

    @property
    def classifies(self) -> bool:
        """Whether outputs are scores of classes: true for the default loss, but not for a decoder's."""
        return self._function("loss") is None and (self._about is None or self._about.classifies)

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics of validation; for a classifier without metrics of its own, accuracy."""
        own = self._function("metrics")
        if own:
            found: Mapping[str, Metric] = own(self.params)
            return found
        return {"accuracy": accuracy} if self.classifies else {}

    def prepare(self, F: Any, x: Any, *, dtype: str, stored: str, shape: tuple[int, ...]) -> Any:
        """Return inputs as the network takes them.

        :param F: mx.nd or mx.sym.
        :param stored: the type that the dataset holds: uint8 is scaled unless the recipe has its own ``preprocess``, or
            the inputs are token ids.
        :param shape: of one example.
        """
        x = F.cast(x, dtype=dtype)
        own = self._function("preprocess")
        if own:
            return own(F, x, self.params)
        if self._scales(stored):
            x = x * (1 / 255)
        return F.transpose(x, axes=(0, 3, 1, 2)) if self._builtin and _channels_last(shape) else x

    def describe_preprocessing(self, stored: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return in words what ``prepare`` does; the exported symbol does it itself."""
        if self._function("preprocess"):
            return {"by": self.name}
        transposed = bool(self._builtin) and _channels_last(shape)
        return {"scale": 1 / 255 if self._scales(stored) else 1.0, "to_channels_first": transposed}

    def _scales(self, stored: str) -> bool:
        return stored == "uint8" and (self._about is None or self._about.inputs is not Inputs.TOKENS)

    @property
    def _about(self) -> Network | None:
        return CATALOGUE[self._builtin] if self._builtin else None

    def _function(self, name: str) -> Callable[..., Any] | None:
        return getattr(self._module, name, None)


def accuracy(F: Any, output: Any, label: Any) -> Any:
    """Return 1 for each example whose highest score is its label's, else 0."""
    return F.argmax(output, axis=1).astype("float64") == label.astype("float64")


def _channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4)


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[2], *shape[:2]) if _channels_last(shape) else shape


def _load(recipe: str) -> ModuleType:
    module = _module(recipe)
    problems = [] if hasattr(module, "network") else [Problem("model.recipe", f"{recipe} defines no network(params)")]
    for name, arguments in _FUNCTIONS.items():
        function = getattr(module, name, None)
        if function is not None and not _takes(function, len(arguments)):
            problems.append(Problem("model.recipe", f"{name} of {recipe} must take ({', '.join(arguments)})"))
    if problems:
        raise SpecError("The job", problems)
    return module


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _module(recipe: str) -> ModuleType:
    if not recipe.endswith(".py"):
        try:
            return importlib.import_module(recipe)
        except ModuleNotFoundError as error:
            if error.name is None or not recipe.startswith(error.name):
                raise  # the recipe is there; something that it imports is not
            raise SpecError("The job", [Problem("model.recipe", f"there is no module {recipe}")]) from None
    path = Path(recipe)
    spec = importlib.util.spec_from_file_location(f"mxdist_recipe_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SpecError("The job", [Problem("model.recipe", f"there is no file {recipe}")])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # a recipe may import what lies beside it
    spec.loader.exec_module(module)
    return module
