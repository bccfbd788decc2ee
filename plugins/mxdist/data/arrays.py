"""Arrays in files (.npy), and what makes them fit for training; every problem is one phrase, for one message with all.

Headers are read without numpy, so that a dataset of many files is checked before a byte of it is digested or sent.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mxdist.errors import DataError

MAX_CLASSES = 1_000_000
"""Outputs that labels alone may ask for; whoever means more says so by ``model.params.classes``."""

_MAGIC = b"\x93NUMPY"
_HEADER_MAX_BYTES = 1 << 20
_CHUNK_BYTES = 16 << 20
_NOT_REAL = {
    "c": "complex numbers", "m": "time spans", "M": "dates", "O": "Python objects", "S": "text", "U": "text",
    "V": "records or raw bytes",
}  # fmt: skip
_ITEM_BYTES = {"U": 4, "M": 0, "m": 0, "O": 0}  # of one character; 0: the number in the name is no size


@dataclass(frozen=True)
class Header:
    """What an .npy file says of itself.

    :param kind: numpy's letter: b, i, u and f are real numbers.
    :param dtype: numpy's name, such as ``<f4``.
    :param end: the size of the whole file (bytes), if the type tells it.
    """

    shape: tuple[int, ...]
    kind: str
    dtype: str
    end: int | None

    @property
    def rows(self) -> int | None:
        """Return the first dimension; None for a single number."""
        return self.shape[0] if self.shape else None


def read_header(stream: BinaryIO) -> Header:
    """Return the header of an .npy file.

    :raises ValueError: it is none, or is cut short; the text says which.
    """
    start = stream.read(8)
    if not start:
        raise ValueError("is empty (0 bytes)")
    if start[:6] != _MAGIC[: len(start)]:
        raise ValueError("is not an array file: it does not begin as .npy does")
    width = 2 if start[6:7] == b"\1" else 4
    length = int.from_bytes(stream.read(width), "little")
    text = stream.read(min(length, _HEADER_MAX_BYTES))
    if len(start) < 8 or not length or len(text) < length:
        raise ValueError("is cut short inside its header")
    try:
        found = ast.literal_eval(text.decode("utf-8" if start[6] > 2 else "latin-1").strip())
        shape, descr = tuple(found["shape"]), found["descr"]
        if not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError
        kind, item_bytes = _kind(descr)
    except (ValueError, SyntaxError, KeyError, TypeError, IndexError, MemoryError, RecursionError):
        raise ValueError("has a header that cannot be read") from None
    begin = 8 + width + length
    return Header(shape, kind, str(descr), begin + math.prod(shape) * item_bytes if item_bytes else None)


def _kind(descr: Any) -> tuple[str, int]:
    """Return numpy's letter for a type, and the bytes of one value; 0 if the name does not tell."""
    if not isinstance(descr, str):  # the fields of a record
        return ("O", 0) if "|O'" in str(descr) else ("V", 0)
    letter = descr[1]
    if letter not in "biuf" and letter not in _NOT_REAL:
        raise ValueError
    return letter, _ITEM_BYTES.get(letter, 1) * int(descr[2:].partition("[")[0] or 0)


def problem_of(path: Path, *, example: bool) -> tuple[Header | None, str]:
    """Return the header of an .npy file if it can be read, and what is wrong with the file; "" if nothing is.

    :param example: it holds examples or labels: real numbers, one row at least, and nothing after them.
    :raises OSError: it cannot be opened.
    """
    with path.open("rb") as stream:
        size = path.stat().st_size
        try:
            header = read_header(stream)
        except ValueError as error:
            return None, str(error)
    return header, _problem(header, size, example=example)


def _problem(header: Header, size: int, *, example: bool) -> str:
    if header.kind == "O" or (example and header.kind in _NOT_REAL):
        need = "only real numbers can be trained on" if example else "only pickle could read them"
        return f"holds {_NOT_REAL[header.kind]} (dtype {header.dtype}); {need}"
    if header.end is not None and (size < header.end or (example and size > header.end)):
        return f"has {size} bytes, but its header promises {header.end}"
    if example and header.rows is None:
        return "is a single number, not a row for each example"
    return f"holds nothing: its shape is {header.shape}" if example and 0 in header.shape else ""


def check_files(paths: dict[str, Path]) -> dict[str, int | None]:
    """Check every .npy file of a dataset; return the rows of each.

    ``x.npy`` and ``y.npy`` of one folder are examples and their labels: they must fit each other.

    :param paths: name in the dataset -> file.
    :raises DataError: naming every file that is wrong.
    """
    headers: dict[str, Header] = {}
    problems: dict[str, str] = {}
    for name, path in paths.items():
        if not name.endswith(".npy"):
            continue
        try:
            header, problem = problem_of(path, example=name.rpartition("/")[2] in ("x.npy", "y.npy"))
        except OSError as error:
            header, problem = None, f"cannot be read: {error.strerror}"
        if problem:
            problems[str(path)] = problem
        elif header is not None:
            headers[name] = header
    for name in headers:
        folder, _, file = name.rpartition("/")
        twin = f"{folder}/y.npy".lstrip("/")
        if file == "x.npy" and twin in headers and headers[name].rows != headers[twin].rows:
            shapes = f"has {headers[name].rows} rows, but y.npy beside it has {headers[twin].rows}"
            problems[str(paths[name])] = f"{shapes}; they need the same number of rows"
    refuse(f"{path} {problem}" for path, problem in problems.items())
    return {name: header.rows for name, header in headers.items()}


def refuse(problems: Iterator[str] | list[str], hint: str = "") -> None:
    """Raise one error with all of these problems, if there are any.

    :raises DataError: there are.
    """
    found = list(problems)
    if len(found) == 1:
        raise DataError(f"{found[0]}.", hint=hint)
    if found:
        lines = "".join(f"\n  {problem}" for problem in found)
        raise DataError(f"the data have {len(found)} problems:{lines}", hint=f"\n{hint}" if hint else "")


def not_real(array: Any) -> str:
    """Return what an array holds instead of real numbers; "" if it holds these."""
    held = _NOT_REAL.get(array.dtype.kind)
    return f"holds {held} (dtype {array.dtype}); only real numbers can be trained on" if held else ""


def not_finite(array: Any, dtype: str) -> str:
    """Return where an array of real numbers holds a value that is not finite in the type ``dtype``; "" if nowhere."""
    import numpy as np

    if array.dtype.kind != "f":
        return ""
    rows = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        piece = np.asarray(array[start : start + rows])
        with np.errstate(over="ignore"):
            good = np.isfinite(piece.astype(dtype, copy=False))
        if not good.all():
            place = np.argwhere(~good)[0]
            return f"holds {piece[tuple(place)]} in row {start + int(place[0])}, which is not finite in {dtype}"
    return ""


def no_classes(y: Any, dtype: str, *, outputs: int | None, learnt: bool) -> str:
    """Return why ``y`` cannot be the classes of examples: whole numbers from 0, exact in ``dtype``; "" if it can.

    :param outputs: of the network, if that is known already.
    :param learnt: the highest label decides how many outputs the network gets.
    """
    import numpy as np

    if y.dtype.kind == "f" and (broken := np.flatnonzero((y != np.floor(y)).reshape(len(y), -1).any(axis=1))).size:
        row = int(broken[0])
        return f"holds {y[row]} in row {row}; the label of a class is a whole number"
    lowest, highest = int(y.min()), int(y.max())
    if lowest < 0:
        return f"holds the label {lowest} in row {_row(y, y.argmin())}; classes are numbered from 0"
    exact = 1 << (int(np.finfo(dtype).nmant) + 1)
    if highest > exact:
        return (
            f"holds the label {highest} in row {_row(y, y.argmax())}; {dtype} keeps whole numbers up to {exact} apart"
        )
    if outputs is not None and highest >= outputs:
        return f"holds the label {highest} in row {_row(y, y.argmax())}, but the network has {outputs} outputs"
    if learnt and highest >= MAX_CLASSES:
        return f"holds the label {highest} in row {_row(y, y.argmax())}: that would be {highest + 1} outputs"
    return ""


def _row(y: Any, place: Any) -> int:
    """Return the row of a place in the flattened ``y``."""
    return int(place) // int(y[:1].size)
