"""Gradients that travel between ranks as float16: half the bytes of float32, and lossy.

Rounding to float16 (10 bits of fraction) is off by at most ``2^-11`` of a number, or by ``2^-25`` when that is smaller
than ``2^-14``. With ``R`` ranks each gradient is rounded once, and their sum at most ``R - 1`` times more. So the
distance from the exact sum is at most ``R * 2^-11`` of the ranks' gradients added by their norms; with two ranks
``2^-10``. Numbers above 65504 become infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mxnet as mx


class HalfSum:
    """Sums arrays over ranks as float16."""

    HINT = "Gradients travel as float16, where what is above 65504 is infinite: set parallelism.compression to none."

    def __init__(self) -> None:
        self._halves: list[mx.nd.NDArray] = []

    def sum_(self, arrays: Sequence[mx.nd.NDArray], send: Callable[[Sequence[mx.nd.NDArray]], None]) -> None:
        """Replace each array by its sum over ranks, rounded; returns at once.

        :param arrays: the same ones each time.
        :param send: replaces arrays by their sums.
        """
        if not self._halves:
            self._halves = [mx.nd.zeros(one.shape, ctx=one.context, dtype="float16") for one in arrays]
        for array, half in zip(arrays, self._halves, strict=True):
            mx.nd.cast(array, dtype="float16", out=half)
        send(self._halves)
        for array, half in zip(arrays, self._halves, strict=True):
            mx.nd.cast(half, dtype=array.dtype, out=array)
