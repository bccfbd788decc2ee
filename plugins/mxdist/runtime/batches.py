"""Which rows each rank sees at each step: decided by the seed and the epoch alone.

An epoch is one permutation of the whole split. Step ``s`` takes its rows ``s*B`` to ``(s+1)*B``, whatever the number of
ranks; each rank takes its contiguous share of these. The last batch of an epoch may be small; then shares differ by one
row, and may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from mxdist.data.arrays import not_real, refuse

_CHUNK_BYTES = 8 << 20
_CHUNK_STEPS = 32


@dataclass(frozen=True)
class Examples:
    """One split in host memory (or mapped from a file): inputs as stored, targets beside them.

    :param split: what messages call it.
    :raises DataError: there are none, they do not fit each other, or are no real numbers; with all that is wrong.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    split: str = "this"

    def __post_init__(self) -> None:
        where = f"of the {self.split} split"
        parts = {"x": self.x, "y": self.y}
        problems = [f"{name} {where} {problem}" for name, part in parts.items() if (problem := not_real(part))]
        single = [
            f"{name} {where} is a single number, not a row for each example" for name in parts if not parts[name].ndim
        ]
        if not single and len(self.x) != len(self.y):
            problems.append(f"there are {len(self.x)} examples, but {len(self.y)} labels {where}")
        elif not single and not len(self.x):
            problems.append(f"there are no examples {where}")
        refuse(problems + single)

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Batch:
    """One rank's share of one global batch, on its device.

    :param rows: examples in this share; 0: nothing to compute, but every collective still to be joined.
    :param total: examples in the global batch.
    """

    x: mx.nd.NDArray | None
    y: mx.nd.NDArray | None
    rows: int
    total: int


def order(count: int, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """Return the order of an epoch's rows, the same on every rank and machine."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(count).astype(np.int64)


def share(total: int, rank: int, size: int) -> slice:
    """Return the part of a batch of ``total`` rows that is ``rank``'s."""
    return slice(total * rank // size, total * (rank + 1) // size)


def steps_of(count: int, batch_size: int) -> int:
    """Return the optimizer steps of one epoch; the last one may be small."""
    return -(-count // batch_size)


def chunk_steps(row_bytes: int, rows: int) -> int:
    """Return how many steps' inputs move to the device at once, for steps of ``rows`` rows."""
    fitting = _CHUNK_BYTES // (max(row_bytes, 1) * rows)
    return int(min(max(fitting, 1), _CHUNK_STEPS))


class Feed:
    """Moves a rank's shares to its device, many steps at once, and hands them out as views.

    A copy to the device waits until MXNet's engine has time for it, so one copy a step would keep Python from running
    ahead; one copy for many steps does not matter.

    :param dtype: type of the targets on the device; inputs keep the type they are stored in.
    """

    def __init__(
        self, examples: Examples, batch_size: int, *, rank: int, size: int, device: mx.Context, dtype: str
    ) -> None:
        self._examples = examples
        self._batch_size = batch_size
        self._rank, self._size = rank, size
        self._device, self._dtype = device, dtype
        self._chunk_steps = chunk_steps(examples.x[:1].nbytes, -(-batch_size // size))

    @property
    def steps(self) -> int:
        """Return the steps of one pass."""
        return steps_of(len(self._examples), self._batch_size)

    def batches(self, rows: NDArray[np.int64], first: int = 0) -> Iterator[Batch]:
        """Yield this rank's share of every step from ``first`` on.

        :param rows: the order of the epoch.
        """
        for start in range(first, self.steps, self._chunk_steps):
            yield from self._chunk(rows, range(start, min(start + self._chunk_steps, self.steps)))

    def _chunk(self, rows: NDArray[np.int64], steps: range) -> Iterator[Batch]:
        globals_ = [rows[step * self._batch_size : (step + 1) * self._batch_size] for step in steps]
        locals_ = [part[share(len(part), self._rank, self._size)] for part in globals_]
        chosen = np.concatenate(locals_)
        x, y = self._move(chosen) if len(chosen) else (None, None)
        begin = 0
        for whole, part in zip(globals_, locals_, strict=True):
            end = begin + len(part)
            if len(part) and x is not None and y is not None:
                yield Batch(x[begin:end], y[begin:end], len(part), len(whole))
            else:
                yield Batch(None, None, 0, len(whole))
            begin = end

    def _move(self, chosen: NDArray[np.int64]) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
        x, y = self._examples.x[chosen], self._examples.y[chosen]
        return (
            mx.nd.array(x, ctx=self._device, dtype=x.dtype),
            mx.nd.array(y, ctx=self._device, dtype=self._dtype),
        )
