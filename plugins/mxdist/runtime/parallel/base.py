"""What a group of ranks can do together, and the group of one.

Everything that is exchanged for people (losses, metrics, counts, decisions) travels as float64 sums, so that a mean is
always the sum of all over the count of all, never a mean of means. Every rank must make the same calls in the same
order.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from mxdist.errors import CheckpointError, DataError, Fenced, MxdistError, SpecError, StoreError, TrainingFailed

Float64 = NDArray[np.float64]


class Group(ABC):
    """The ranks of one world."""

    rank: int
    size: int

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned when this world was first asked for ``key``; kept as long as the world."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def forget(self, key: Hashable) -> Any:
        """Keep ``key`` no longer; return what was kept, or None."""
        return self._kept.pop(key, None)

    @abstractmethod
    def sum_(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Replace each array by its sum over all ranks; returns at once, MXNet's engine keeps the order."""

    @abstractmethod
    def sum_named_(self, array: mx.nd.NDArray, name: str) -> None:
        """Replace one array by its sum over all ranks; returns at once.

        :param name: not in flight twice; ranks may reach their names in any order.
        """

    @abstractmethod
    def total(self, values: Float64) -> Float64:
        """Return the sum of ``values`` over all ranks, in float64."""

    @abstractmethod
    def broadcast_(self, arrays: Mapping[str, mx.nd.NDArray]) -> None:
        """Replace each array by rank 0's."""

    @abstractmethod
    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's ``data``."""

    @abstractmethod
    def close(self) -> None:
        """Leave the world together with all others."""

    def gather(self, row: Sequence[float]) -> Float64:
        """Return every rank's ``row``, one line a rank."""
        table = np.zeros((self.size, len(row)))
        table[self.rank] = row
        return self.total(table.ravel()).reshape(table.shape)

    def collect(self, document: Any) -> list[Any]:
        """Return every rank's document (JSON values), in the order of ranks."""
        text = json.dumps(document).encode()
        sizes = self.gather([float(len(text))])[:, 0].astype(int)
        table = self.gather([*map(float, text), *[0.0] * (int(sizes.max()) - len(text))])
        return [json.loads(row[:size].astype(np.uint8).tobytes()) for row, size in zip(table, sizes, strict=True)]

    def any(self, flag: bool) -> bool:
        """Return whether any rank says so; the answer is the same on all."""
        return bool(self.total(np.array([float(flag)]))[0])

    def means(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Return the mean of each name from ``(sum, count)`` pairs, over all ranks; NaN where nobody counted.

        :param sums: the same names on every rank.
        """
        names = sorted(sums)
        flat = self.total(np.array([number for name in names for number in sums[name]], dtype=np.float64))
        pairs = flat.reshape(-1, 2)
        return {name: float(s / n) if n else float("nan") for name, (s, n) in zip(names, pairs, strict=True)}

    def share(self, decide: Callable[[], Any]) -> Any:
        """Return what ``decide`` (JSON values) returns on rank 0; what it raises there is raised on every rank."""
        error: MxdistError | None = None
        answer: dict[str, Any] = {}
        if self.rank == 0:
            try:
                answer = {"value": decide()}
            except MxdistError as raised:
                error = raised
                answer = {"error": type(raised).__name__, "message": raised.message, "hint": raised.hint}
                answer["retryable"] = raised.retryable
        answer = json.loads(self.broadcast_bytes(json.dumps(answer).encode()))
        if error is not None:
            raise error
        if "error" in answer:
            raise _error(answer)
        return answer["value"]

    def differing(self, digest: bytes) -> list[int]:
        """Return the ranks whose SHA-256 differs from rank 0's."""
        words = np.frombuffer(digest, dtype="<u4").astype(np.float64)  # which holds 32 bits exactly
        table = self.gather(list(words))
        return [rank for rank in range(self.size) if (table[rank] != table[0]).any()]

    def check_equal(self, arrays: Mapping[str, mx.nd.NDArray], *, where: str) -> str:
        """Make sure that all ranks hold the same bits; return their SHA-256.

        :raises TrainingFailed: they do not; naming the ranks.
        """
        digest = digest_arrays(arrays)
        different = self.differing(bytes.fromhex(digest))
        if different:
            ranks = ", ".join(map(str, different))
            raise TrainingFailed(
                f"the parameters of rank {ranks} differ from those of rank 0 {where}.",
                rank=different[0],
                hint="Is something in the network or the data random, or decided by the rank?",
            )
        return digest


def plain(array: mx.nd.NDArray, device: mx.Context | None = None) -> mx.nd.NDArray:
    """Return a copy in rows and columns, which is what Horovod can read; returns at once.

    Convolutions leave weights and what they make in a layout of oneDNN. Operators of MXNet that do not know it, like
    its multiplication, ask for rows and columns first. Gradients of parameters are always plain, so they may be summed
    in place; everything else that goes to Horovod and was not made for that goes through here.

    :param device: where the copy is to be; default: where the array is.
    """
    copy = array * 1
    return copy if device is None else copy.as_in_context(device)


def digest_arrays(arrays: Mapping[str, mx.nd.NDArray]) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of ``arrays``, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        values = arrays[name].asnumpy()
        total.update(f"{name} {values.dtype} {values.shape}\n".encode())
        total.update(np.ascontiguousarray(values).data)
    return total.hexdigest()


def _error(answer: Mapping[str, Any]) -> MxdistError:
    known: dict[str, type[MxdistError]] = {
        kind.__name__: kind for kind in (CheckpointError, DataError, Fenced, StoreError, TrainingFailed)
    }
    kind = known.get(answer["error"], MxdistError)
    if answer["error"] == SpecError.__name__:
        kind = DataError
    return kind(answer["message"], hint=answer["hint"], retryable=answer["retryable"])


class Alone(Group):
    """A world of one rank: nothing to exchange."""

    rank = 0
    size = 1

    def sum_(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Leave the arrays as they are."""

    def sum_named_(self, array: mx.nd.NDArray, name: str) -> None:
        """Leave the array as it is."""

    def total(self, values: Float64) -> Float64:
        """Return the values."""
        return np.array(values, dtype=np.float64)

    def broadcast_(self, arrays: Mapping[str, mx.nd.NDArray]) -> None:
        """Leave the arrays as they are."""

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return the bytes."""
        return data

    def close(self) -> None:
        """Wait for MXNet's engine."""
        mx.nd.waitall()
