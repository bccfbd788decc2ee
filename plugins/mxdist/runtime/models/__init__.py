"""The networks that mxdist brings, by the names of ``mxdist.spec.networks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon.model_zoo import vision
from numpy.typing import NDArray

from mxdist.errors import DataError, Problem, SpecError
from mxdist.runtime.models.basic import Network, cifar_cnn, lenet, mlp
from mxdist.runtime.models.transformer import Decoder, Encoder, TokenLoss
from mxdist.spec.networks import CATALOGUE, DECODERS, Inputs, size_of, wrong_params

__all__ = ["Decoder", "Encoder", "Network", "TokenLoss", "build", "check_inputs", "fit"]

_BUILDERS: dict[str, Callable[..., mx.gluon.HybridBlock]] = {"cifar_cnn": cifar_cnn, "lenet": lenet, "mlp": mlp}
_STYLE = ("dropout", "pad_id", "pre_norm", "tied")


def build(name: str, params: Mapping[str, Any]) -> mx.gluon.HybridBlock:
    """Return the network ``name``, not yet initialised.

    :param params: ``classes`` if it classifies, and whatever the network takes by name.
    :raises SpecError: it does not take one of them.
    """
    problems = [Problem(f"model.params.{key}", problem) for key, problem in wrong_params(name, params).items()]
    if problems:
        raise SpecError("The job", problems)
    size = size_of(name, params)
    if size is not None:
        style = {key: params[key] for key in _STYLE if key in params}
        return Decoder(size, **style) if name in DECODERS else Encoder(size, params["classes"], **style)
    if name in _BUILDERS:
        return _BUILDERS[name](**params)
    return vision.get_model(name, **params)


def fit(
    name: str, params: Mapping[str, Any], x: NDArray[Any], y: NDArray[Any], shape: tuple[int, ...], split: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs and targets of the network ``name``: a decoder's targets are its inputs, one token later.

    :param shape: of one example as the network takes it.
    :raises SpecError: the network cannot take examples of that shape.
    :raises DataError: token ids are no whole numbers, or the vocabulary does not have them.
    """
    about = CATALOGUE[name]
    if not about.classifies and len(shape) == 1:
        if shape[0] < 2:
            raise DataError(f"x of the {split} split has examples of {shape[0]} tokens; there is no next one.")
        x, y, shape = x[:, :-1], x[:, 1:], (shape[0] - 1,)
    check_inputs(name, params, shape)
    size = size_of(name, params)
    if size is not None:
        for tokens in (x, y) if not about.classifies else (x,):
            _check_tokens(tokens, size.vocabulary, split)
    return x, y


def _check_tokens(tokens: NDArray[Any], vocabulary: int, split: str) -> None:
    """Refuse ids that the table does not have: MXNet would take its last row instead."""
    if not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"x of the {split} split holds {tokens.dtype}; token ids must be integers.")
    if not len(tokens):
        return
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= vocabulary:
        raise DataError(
            f"token ids of the {split} split go from {least} to {largest}, but the vocabulary has {vocabulary}.",
            hint="Set model.params.vocabulary, or map unknown tokens to an id of their own.",
        )


def check_inputs(name: str, params: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Refuse examples that the network ``name`` cannot take, before MXNet fails somewhere inside.

    :param shape: of one example as the network takes it: (channels, height, width), or (tokens,).
    :raises SpecError: they are no images, too small or too large, or longer than there are positions.
    """
    about = CATALOGUE[name]
    problem = None
    if about.inputs is Inputs.IMAGES:
        problem = _wrong_image(shape, *about.sides)
    elif about.inputs is Inputs.TOKENS:
        size = size_of(name, params)
        problem = _wrong_sequence(shape, size.positions if size else 0)
    if problem:
        raise SpecError("The job", [Problem("model.name", f"{name} takes {problem}")])


def _wrong_image(shape: tuple[int, ...], least: int, largest: int | None) -> str | None:
    if len(shape) != 3:
        return f"images (channels, height, width), not examples of shape {shape}"
    if min(shape[1:]) >= least and (largest is None or max(shape[1:]) <= largest):
        return None
    upper = "" if largest is None else f" and at most {largest} x {largest}"
    return f"images of at least {least} x {least}{upper} pixels; these are {shape[1]} x {shape[2]}"


def _wrong_sequence(shape: tuple[int, ...], positions: int) -> str | None:
    if len(shape) != 1:
        return f"token ids (tokens,), not examples of shape {shape}"
    if shape[0] > positions:
        return f"at most {positions} tokens; these examples have {shape[0]} (see the parameter positions)"
    return None
