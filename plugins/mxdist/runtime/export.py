"""The trained model as files that need mxnet alone: a graph from stored inputs to probabilities, and its arrays.

::

    symbol.json         preprocessing, network, softmax; arguments have standard names, the input is "data"
    params.npz          arrays by standard name, no pickle
    model.json          what it is: network, labels, input, framework, parent
    input_example.npy   a few rows as the dataset holds them
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

import mxdist
from mxdist.runtime import finetune, network
from mxdist.runtime.checkpoint import pack
from mxdist.runtime.recipe import Recipe

_EXAMPLE_ROWS = 4


def symbol_of(forward: network.Forward, *, probabilities: bool) -> mx.sym.Symbol:
    """Return the graph of the whole model, its arguments renamed to standard names.

    :param probabilities: put a softmax on top.
    """
    output = forward(mx.sym.var("data"))
    if probabilities:
        output = mx.sym.softmax(output, axis=-1, name="probabilities")
    standard = {parameter.name: name for name, parameter in network.parameters(forward.net).items()}
    graph = json.loads(output.tojson())
    for node in graph["nodes"]:
        if node["op"] == "null":
            node["name"] = standard.get(node["name"], node["name"])
            node.pop("attrs", None)  # shapes and initialisers of the training; the arrays have their own
    return mx.sym.load_json(json.dumps(graph))


def write(
    folder: Path,
    forward: network.Forward,
    recipe: Recipe,
    *,
    labels: tuple[int, ...] | None,
    example: NDArray[Any],
    classes: int,
    dtype: str,
    parent: str | None,
) -> Path:
    """Write the model into ``folder``, replacing what was there.

    :param example: rows as the dataset holds them.
    :param classes: the width of the output.
    :param parent: digest of the model that the training started from.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    example = np.ascontiguousarray(example[:_EXAMPLE_ROWS])
    symbol = symbol_of(forward, probabilities=recipe.classifies)
    (folder / "symbol.json").write_text(symbol.tojson(), encoding="utf-8")
    (folder / "params.npz").write_bytes(pack(finetune.as_arrays(forward.net)))
    np.save(folder / "input_example.npy", example, allow_pickle=False)
    about = {
        "format": 1,
        "network": recipe.name,
        "params": recipe.params,
        "classes": classes,
        "labels": None if labels is None else list(labels),
        "label_digest": finetune.label_digest(labels),
        "probabilities": recipe.classifies,
        "input_shape": list(example.shape[1:]),
        "input_dtype": example.dtype.name,
        "preprocessing": recipe.describe_preprocessing(example.dtype.name, example.shape[1:]),
        "dtype": dtype,
        "framework": {"mxnet": mx.__version__, "numpy": np.__version__, "mxdist": mxdist.__version__},
        "parent": parent,
    }
    (folder / "model.json").write_text(json.dumps(about, indent=1, sort_keys=True), encoding="utf-8")
    return folder
