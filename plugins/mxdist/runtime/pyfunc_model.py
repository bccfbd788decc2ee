"""Predicts with a model that mxdist exported. This one file travels with the model and needs only mxnet and numpy.

The graph holds everything from stored inputs to probabilities, so it predicts from what the dataset holds (for images:
bytes from 0 to 255), on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

_ROWS_AT_ONCE = 256


class Predictor:
    """An exported model, ready to predict.

    :param folder: ``model.json``, ``symbol.json`` and ``params.npz``.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.about: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        symbol = mx.sym.load_json((folder / "symbol.json").read_text(encoding="utf-8"))
        self._block = mx.gluon.SymbolBlock(symbol, [mx.sym.var("data", dtype=self.about["dtype"])])
        self._block.cast(self.about["dtype"])
        with np.load(folder / "params.npz", allow_pickle=False) as arrays:
            for name, parameter in self._block.collect_params().items():
                values = arrays[name]
                parameter.shape = values.shape
                parameter.initialize(ctx=mx.cpu())
                parameter.set_data(mx.nd.array(values, ctx=mx.cpu(), dtype=values.dtype))
        self._block.hybridize(static_alloc=True)

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> np.ndarray:
        """Return one row for each example: the probability of each class, or the outputs of a model that has none.

        :param data: an array, or a pandas DataFrame with one row for each example (flattened).
        :param params: ignored; MLflow passes it.
        """
        x = self._rows(data)
        parts = [self._some(x[start : start + _ROWS_AT_ONCE]) for start in range(0, len(x), _ROWS_AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros((0, self.about["classes"]), dtype=self.about["dtype"])

    def _some(self, x: np.ndarray) -> np.ndarray:
        output: np.ndarray = self._block(mx.nd.array(x, ctx=mx.cpu(), dtype=self.about["dtype"])).asnumpy()
        return output

    def _rows(self, data: Any) -> np.ndarray:
        values = data.to_numpy() if hasattr(data, "to_numpy") else np.asarray(data)
        if values.dtype == object:  # a column of arrays
            values = np.array([[np.asarray(cell) for cell in row] for row in values.tolist()])
        shape = tuple(self.about["input_shape"])
        rows = len(values)
        if values.size != rows * int(np.prod(shape)):
            raise ValueError(f"each example must have shape {shape}, but the input has shape {values.shape}")
        return values.reshape(rows, *shape)


def _load_pyfunc(path: str) -> Predictor:
    """Return the model in ``path``: MLflow calls this."""
    return Predictor(path)
