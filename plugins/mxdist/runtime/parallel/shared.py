"""Gradients of ranks on one host, summed in memory that all of them map.

Horovod over Gloo sends gradients through sockets, also between ranks of one host: each byte is copied into a buffer,
through the kernel twice, and out again. Here the gradients themselves live in one piece of shared memory, a part for
each rank. A step's sum is a reduce-scatter and an all-gather in place: once every rank has computed, rank ``r`` adds
part ``r`` of all ranks' gradients, in the order of the ranks, and writes the sum to all of them. So each rank reads and
writes its gradients once, and sums are the same bit for bit from run to run.

Ranks wake each other, as ``nearby`` does; one that waits for long tells whom it waits for.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from numpy.typing import NDArray

from mxdist.runtime.parallel import nearby
from mxdist.runtime.parallel.base import Group
from mxdist.runtime.parallel.nearby import Neighbour, Waiting
from mxdist.runtime.update import Update

log = logging.getLogger(__name__)

_ALIGNED = 64  # bytes: what oneDNN's kernels like, and a line of every cache
_HERE = b"h"
_BLOCK = 1 << 16  # numbers that are added and handed out while they are in the cache


class SharedSum:
    """Sums the gradients of an ``Update`` over ranks of one host.

    :param parts: the numbers of each rank, as one row each; shape (ranks, numbers).
    :param others: all ranks but this one.
    """

    def __init__(self, group: Group, parts: NDArray[Any], others: Iterable[Neighbour]) -> None:
        self._parts, self._others = parts, tuple(others)
        each = -(-parts.shape[1] // group.size)
        self._own = slice(group.rank * each, min((group.rank + 1) * each, parts.shape[1]))

    @classmethod
    def join(cls, update: Update, group: Group, least_mb: float | None, waiting: Waiting) -> SharedSum | None:
        """Move the gradients into shared memory; every rank must call it.

        :param least_mb: gradients with fewer MiB stay with Horovod: their sum takes as long as waiting does.
        :return: None where ranks share no host, or no memory can be had: then nothing has changed.
        """
        gradients = update.gradients
        alike = {(one.context.device_type, one.dtype) for one in gradients}
        starts = _starts(gradients)
        size = starts[-1] * gradients[0].dtype(0).itemsize if gradients else 0
        wanted = least_mb is not None and len(alike) == 1 and size >= max(1, least_mb * 2**20)
        if group.size == 1 or group.any(not wanted or gradients[0].context.device_type != "cpu"):
            return None
        if group.differing(nearby.this_host()):
            return None
        others = nearby.join(group, {rank: 0 for rank in range(group.size) if rank != group.rank}, waiting)
        memory = None if group.any(len(others) < group.size - 1) else _map(group, size)
        if group.any(memory is None) or memory is None:
            log.info("gradients go through Horovod: ranks have no %d MiB of memory together", size * group.size >> 20)
            for other in others.values():
                other.close()
            return None
        parts = np.frombuffer(memory, dtype=gradients[0].dtype).reshape(group.size, -1)
        _move(update, parts[group.rank], starts)
        log.info("the gradients of %d ranks are summed in %d MiB of shared memory", group.size, parts.nbytes >> 20)
        return cls(group, parts, others.values())

    def sum_(self) -> None:
        """Replace the gradients by their sums over all ranks; waits for MXNet's engine and for the other ranks."""
        mx.nd.waitall()
        self._meet()
        first, *others = self._parts
        for start in range(self._own.start, self._own.stop, _BLOCK):
            block = slice(start, min(start + _BLOCK, self._own.stop))
            total = first[block]
            for other in others:
                np.add(total, other[block], out=total)
            for other in others:
                other[block] = total
        self._meet()

    def close(self) -> None:
        """Leave the other ranks."""
        for other in self._others:
            other.close()

    def _meet(self) -> None:
        for other in self._others:
            other.tell(_HERE)
        for other in self._others:
            other.hear(_HERE)


def _starts(arrays: Sequence[mx.nd.NDArray]) -> list[int]:
    """Return where each array begins in a row of numbers, and where the row ends."""
    if not arrays:
        return [0]
    numbers = _ALIGNED // int(arrays[0].dtype(0).itemsize)
    return [0, *accumulate(-(-array.size // numbers) * numbers for array in arrays)]


def _map(group: Group, size: int) -> mmap.mmap | None:
    """Return memory of ``size`` bytes for each rank, which all ranks see; None if this rank cannot have it."""
    created = _create(size * group.size) if group.rank == 0 else None
    where = group.share(lambda: None if created is None else (nearby.place(created), nearby.mark(created)))
    memory = None
    if where is not None:
        try:
            memory = nearby.open_memory(where[0], size * group.size, where[1])
        except (OSError, ValueError) as error:
            log.info("%s cannot be mapped: %s", where[0], error)
    group.total(np.zeros(1))  # nobody opens it any more
    if created is not None:
        os.close(created)
    return memory


def _create(size: int) -> int | None:
    try:
        return nearby.create(size)
    except OSError:
        return None


def _move(update: Update, part: NDArray[Any], starts: Sequence[int]) -> None:
    """Let the gradients of ``update`` live in ``part``."""
    moved = []
    for gradient, start in zip(update.gradients, starts, strict=False):
        view = part[start : start + gradient.size].reshape(gradient.shape)
        view[...] = 0
        moved.append(mx.nd.from_numpy(view, zero_copy=True))
    autograd.mark_variables(update.weights, moved, "write")
    for parameter, gradient in zip(update.parameters, moved, strict=True):
        parameter._grad = [gradient]
    update.gradients = moved
