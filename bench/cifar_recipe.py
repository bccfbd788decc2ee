"""The guide's CNN as a recipe: the same network and the same preprocessing as in ``plain_loop.py``."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import plain_loop


def network(params: dict[str, Any]) -> mx.gluon.HybridBlock:
    """Return the CNN."""
    return plain_loop.network()


def preprocess(F: Any, x: Any, params: dict[str, Any]) -> Any:
    """Put channels first; scale to 0..1, subtract the mean and divide by the deviation: one factor, one term."""
    x = F.transpose(x, axes=(0, 3, 1, 2))
    scale = [1 / 255 / deviation for deviation in plain_loop.STD]
    shift = [-mean / deviation for mean, deviation in zip(plain_loop.MEAN, plain_loop.STD, strict=True)]
    planes = F.split(x, num_outputs=3, axis=1)
    return F.concat(*[planes[i] * scale[i] + shift[i] for i in range(3)], dim=1)
