"""The networks that mxdist brings, as far as they are known without MXNet: names, hyperparameters, sizes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Scalar = bool | int | float | str
"""A hyperparameter's value."""


class Kind(StrEnum):
    """What a hyperparameter may be."""

    COUNT = "a whole number from 1"
    INDEX = "a whole number from 0"
    FLAG = "true or false"
    FRACTION = "a number from 0, less than 1"


class Inputs(StrEnum):
    """What a network takes as one example."""

    ANY = "any"
    IMAGES = "images"
    TOKENS = "tokens"


@dataclass(frozen=True)
class Size:
    """The size of a Transformer.

    :param layers: blocks of attention and feed-forward.
    :param units: width of the representation.
    :param heads: of each attention; they divide ``units``.
    :param hidden: width of each feed-forward layer.
    :param vocabulary: token ids go from 0 to one less.
    :param positions: the longest sequence.
    """

    layers: int
    units: int
    heads: int
    hidden: int
    vocabulary: int
    positions: int

    @property
    def block(self) -> int:
        """Numbers in one block: four square matrices, two of the feed-forward, their biases, two normalisations."""
        attention = 4 * (self.units**2 + self.units)
        return attention + 2 * self.units * self.hidden + self.hidden + self.units + 4 * self.units

    @property
    def encoder(self) -> int:
        """Numbers in an encoder with two segments, a normalisation after the embeddings, and a pooler."""
        embeddings = (self.vocabulary + self.positions + 2) * self.units + 2 * self.units
        return embeddings + self.layers * self.block + self.units**2 + self.units

    @property
    def decoder(self) -> int:
        """Numbers in a decoder with a normalisation at its end, whose output layer is the embedding again."""
        return (self.vocabulary + self.positions) * self.units + self.layers * self.block + 2 * self.units


ENCODERS = {
    "transformer_encoder": Size(2, 64, 2, 256, 1000, 128),
    "bert_base": Size(12, 768, 12, 3072, 30522, 512),
    "bert_large": Size(24, 1024, 16, 4096, 30522, 512),
}
"""BERT's sizes as published (Devlin et al., "BERT", 2019, section 3), and a small one."""

DECODERS = {
    "transformer_decoder": Size(2, 64, 2, 256, 1000, 128),
    "gpt2_small": Size(12, 768, 12, 3072, 50257, 1024),
    "gpt2_medium": Size(24, 1024, 16, 4096, 50257, 1024),
    "gpt2_large": Size(36, 1280, 20, 5120, 50257, 1024),
    "gpt2_xl": Size(48, 1600, 25, 6400, 50257, 1024),
}
"""GPT-2's sizes as published (Radford et al., "Language models are unsupervised multitask learners", 2019, table 2),
and a small one; hidden layers are four times as wide."""

RESNETS = tuple(f"resnet{depth}_v{version}" for version in (1, 2) for depth in (18, 34, 50, 101, 152))
VGGS = tuple(f"vgg{depth}{norm}" for norm in ("", "_bn") for depth in (11, 13, 16, 19))
DENSENETS = tuple(f"densenet{depth}" for depth in (121, 161, 169, 201))
MOBILENETS = tuple(f"mobilenet{version}{width}" for version in ("", "v2_") for width in ("1.0", "0.75", "0.5", "0.25"))


@dataclass(frozen=True)
class Network:
    """What is known of a network by name.

    :param params: its hyperparameters, besides ``classes``.
    :param inputs: what one example is.
    :param classifies: outputs are scores of classes; else the network has a loss of its own.
    :param sides: the least and, if there is one, the largest height and width of an image.
    """

    params: Mapping[str, Kind] = field(default_factory=dict)
    inputs: Inputs = Inputs.IMAGES
    classifies: bool = True
    sides: tuple[int, int | None] = (1, None)

    @property
    def known(self) -> dict[str, Kind]:
        """The hyperparameters that a job may give."""
        return {**({"classes": Kind.COUNT} if self.classifies else {}), **dict(sorted(self.params.items()))}


_SIZE = dict.fromkeys(Size.__dataclass_fields__, Kind.COUNT)
_TRANSFORMER = {**_SIZE, "dropout": Kind.FRACTION, "pad_id": Kind.INDEX, "pre_norm": Kind.FLAG}

CATALOGUE: dict[str, Network] = {
    "cifar_cnn": Network({"channels": Kind.COUNT}, sides=(4, None)),
    "lenet": Network({"channels": Kind.COUNT, "hidden": Kind.COUNT, "batch_norm": Kind.FLAG}, sides=(16, None)),
    "mlp": Network({"hidden": Kind.COUNT, "layers": Kind.COUNT}, Inputs.ANY),
    **dict.fromkeys(ENCODERS, Network(_TRANSFORMER, Inputs.TOKENS)),
    **dict.fromkeys(DECODERS, Network({**_TRANSFORMER, "tied": Kind.FLAG}, Inputs.TOKENS, classifies=False)),
    **dict.fromkeys(RESNETS, Network({"thumbnail": Kind.FLAG})),
    **dict.fromkeys(VGGS, Network(sides=(32, None))),
    "alexnet": Network(sides=(63, None)),
    **dict.fromkeys(DENSENETS, Network({"dropout": Kind.FRACTION}, sides=(221, None))),
    "squeezenet1.0": Network(sides=(213, 420)),
    "squeezenet1.1": Network(sides=(209, 416)),
    "inceptionv3": Network(sides=(299, None)),
    **dict.fromkeys(MOBILENETS, Network()),
}
"""Every network by name: mxdist's own, and MXNet's model zoo under the zoo's names."""

NETWORKS = tuple(CATALOGUE)


def unknown(name: str) -> str:
    """Return what to say of a name that no network has."""
    close = difflib.get_close_matches(name, NETWORKS, n=3, cutoff=0.5)
    if close:
        return f"unknown model {name!r}; did you mean {', '.join(close)}? Or give a recipe"
    return f"unknown model {name!r}; known are {', '.join(NETWORKS)}, or give a recipe"


def wrong_params(name: str, params: Mapping[str, Scalar]) -> dict[str, str]:
    """Return what is wrong with the hyperparameters of network ``name``, by hyperparameter."""
    known = CATALOGUE[name].known
    problems = {}
    for key, value in params.items():
        if key not in known:
            problems[key] = f"{name} has no such parameter; known are {', '.join(known)}"
        elif not _is(known[key], value):
            problems[key] = f"must be {known[key].value}, not {value!r}"
    if not problems and (size := size_of(name, params)) and size.units % size.heads:
        problems["heads"] = f"{size.heads} heads cannot share {size.units} units equally"
    return problems


def cast_params(name: str, params: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return hyperparameters with those that arrived as text cast to what network ``name`` takes."""
    known = CATALOGUE[name].known
    return {key: _cast(known[key], value) if key in known else value for key, value in params.items()}


def _cast(kind: Kind, value: Scalar) -> Scalar:
    if not isinstance(value, str):
        return value
    if kind is Kind.FLAG:
        return {"true": True, "false": False}.get(value.lower(), value)
    try:
        return float(value) if kind is Kind.FRACTION else int(value)
    except ValueError:
        return value


def size_of(name: str, params: Mapping[str, Scalar]) -> Size | None:
    """Return the size of a Transformer, with what ``params`` change; None for other networks."""
    size = ENCODERS.get(name) or DECODERS.get(name)
    if size is None:
        return None
    return Size(**{key: int(params.get(key, getattr(size, key))) for key in _SIZE})


def _is(kind: Kind, value: Scalar) -> bool:
    if kind is Kind.FLAG:
        return isinstance(value, bool)
    if isinstance(value, bool | str):
        return False
    if kind is Kind.FRACTION:
        return 0 <= value < 1
    return isinstance(value, int) and value >= (kind is Kind.COUNT)
