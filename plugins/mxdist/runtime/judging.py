"""How far the numbers of a planned world are from those of one process, and whether that is too far.

A gradient is judged tensor by tensor, for a small one may be wrong while the largest is right. Where sums cancel, as
for a bias before a BatchNorm, a gradient is nothing but rounding: so no tensor is measured by less than a share of the
largest. Weights are judged by what a step changed in them: against the weights themselves, a step at a low rate would
vanish, whatever it did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxdist.errors import TrainingFailed
from mxdist.runtime.parallel.base import Group

Arrays = Mapping[str, NDArray[Any]]
"""Arrays in float64, by their parameters' names."""


@dataclass(frozen=True)
class Bounds:
    """What is rounding.

    :param gradient: the largest difference in a tensor, as a share of its largest number.
    :param floor: what that number is taken to be at least, as a share of the largest in any tensor.
    :param change: the largest difference of a change, as a share of the largest change.
    :param by_norm: changes are judged by their norm instead: where gradients are mostly rounding, Adam makes steps of
        full size in either direction, here and there.
    :param epsilon: how exact a stored weight is, as a share of itself.
    """

    gradient: float
    floor: float
    change: float
    by_norm: bool
    epsilon: float


EXACT = Bounds(gradient=1e-9, floor=1e-3, change=1e-6, by_norm=False, epsilon=2.0**-52)
"""Both sides compute in float64."""

FLOAT32 = Bounds(gradient=1e-3, floor=1e-2, change=0.1, by_norm=True, epsilon=2.0**-23)
"""The planned world computes in float32, on the same rows."""

LOOSE = Bounds(gradient=5e-2, floor=1e-2, change=0.1, by_norm=True, epsilon=2.0**-23)
"""The same for a second look at what was right in float64: a ReLU at the edge may well be on its other side."""


@dataclass(frozen=True)
class Difference:
    """How far the arrays of one rank are from those of one process, at most.

    :param absolute: the largest difference of two numbers; infinite if one is not finite.
    :param relative: the same over the largest number that one process has in this array.
    :param share: what is judged: the same over the number that it is measured by.
    """

    name: str
    absolute: float
    relative: float
    share: float

    def text(self) -> str:
        """Return it in words."""
        return f"{self.name} differs by up to {self.absolute:.3g}, {self.relative:.3g} of its largest value"


def largest_difference(found: Arrays, wanted: Arrays, *, floor: float = 1.0, slack: float = 0.0) -> Difference:
    """Return the difference of two arrays of the same name that is the largest by what it is measured by.

    Each array is measured by its own largest number.

    :param found: some of the names of ``wanted``.
    :param floor: the least that an array is measured by, as a share of the largest number of all; 1: all by that.
    :param slack: what is added to that measure.
    """
    scale = max((_largest(one) for one in wanted.values()), default=0.0)
    worst = Difference("nothing", 0.0, 0.0, 0.0)
    for name, array in found.items():
        distance = np.abs(array - wanted[name])
        absolute = _largest(distance) if np.isfinite(distance).all() else math.inf
        own = _largest(wanted[name])
        share = _over(absolute, max(own, floor * scale) + slack)
        if share > worst.share:
            worst = Difference(name, absolute, _over(absolute, own), share)
    return worst


def gradients(found: Arrays, wanted: Arrays, bounds: Bounds) -> Difference:
    """Return how far gradients are off, judged by ``bounds.gradient``."""
    return largest_difference(found, wanted, floor=bounds.floor)


def changes(found: Arrays, wanted: Arrays, weights: Arrays, bounds: Bounds) -> Difference:
    """Return how far the changes of a step are off, judged by ``bounds.change``.

    :param weights: before the step; a change cannot be more exact than they are stored.
    """
    stored = 8 * bounds.epsilon / bounds.change
    if not bounds.by_norm:
        return largest_difference(found, wanted, slack=stored * max(map(_largest, weights.values()), default=0.0))
    worst = largest_difference(found, wanted)
    off = norm({name: array - wanted[name] for name, array in found.items()})
    measure = norm({name: wanted[name] for name in found}) + stored * norm({name: weights[name] for name in found})
    return Difference(worst.name, worst.absolute, worst.relative, _over(off, measure))


def judge(own: Difference, bound: float, names: Sequence[str], group: Group, *, what: str, hint: str) -> float:
    """Refuse, on every rank, if any rank is too far off; every rank must ask. Return the largest share of all.

    :param names: all names that a difference may have, in the same order on every rank.
    :param what: the words before the name.
    :raises TrainingFailed: a share is above ``bound``; naming tensor, size and rank. Not retryable.
    """
    known = [*names, "nothing"]
    row = [own.share, own.absolute, own.relative, float(known.index(own.name))]
    table = group.gather([min(value, 1e300) for value in row])
    rank = int(table[:, 0].argmax())
    share, absolute, relative, index = (float(value) for value in table[rank])
    if share <= bound:
        return share
    worst = Difference(known[int(index)], absolute, relative, share)
    raise TrainingFailed(f"{what} of {worst.text()}, on rank {rank}.", rank=rank, hint=hint, retryable=False)


def norm(arrays: Arrays) -> float:
    """Return the Euclidean norm of all numbers; infinite if one is not finite."""
    total = sum(float(np.square(array).sum()) for array in arrays.values())
    return math.sqrt(total) if math.isfinite(total) else math.inf


def _largest(array: NDArray[Any]) -> float:
    return float(np.abs(array).max()) if array.size else 0.0


def _over(absolute: float, measure: float) -> float:
    if not absolute:
        return 0.0
    return absolute / measure if measure else math.inf
