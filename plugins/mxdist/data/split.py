"""Dividing examples into train, validation and test, and reading one of these back.

An example's place is decided by the digest of its own bytes, its label and the seed. No random generator takes part, so
every process, machine and version of numpy gives the same answer; the order of the rows does not matter, equal examples
never land on both sides of a border, and examples that are added later move few of those that were there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxdist.data.arrays import check_files, refuse
from mxdist.errors import DataError
from mxdist.spec.dataset import Split

if TYPE_CHECKING:
    import numpy as np

SPLITS = ("train", "validation", "test")
_ROWS_AT_ONCE = 1024


def stratify(keys: Sequence[bytes], labels: Sequence[int], split: Split) -> dict[str, list[int]]:
    """Return the rows of each split. Within every label the shares are right to one example.

    The rows of a split are in the order of their keys, so labels come well mixed, however the source was sorted.

    :param keys: a digest of each example; equal examples have equal keys.
    :raises DataError: a split that was asked for would be empty.
    """
    shares = {name: getattr(split, name) for name in SPLITS}
    rows: dict[str, list[int]] = {name: [] for name in SPLITS}
    owed = dict.fromkeys(SPLITS, 0.0)
    by_label: dict[int, list[tuple[bytes, int]]] = {}
    for row, (key, label) in enumerate(zip(keys, labels, strict=True)):
        by_label.setdefault(label, []).append((key, row))
    for label in sorted(by_label):
        ordered = sorted(by_label[label])
        _deal(ordered, _counts(len(ordered), shares, owed), rows)
    for name, share in shares.items():
        if share and not rows[name]:
            raise DataError(f"{len(keys)} examples are too few: the {name} split ({share:g} of them) would be empty.")
    return {name: sorted(found, key=lambda row: (keys[row], row)) for name, found in rows.items() if found}


def _counts(total: int, shares: Mapping[str, float], owed: dict[str, float]) -> list[int]:
    """Return the size of each split of ``total`` examples; what rounding takes is owed, and paid at a later label."""
    counts = {name: int(total * share) for name, share in shares.items()}
    for name, share in shares.items():
        owed[name] += total * share - counts[name]
    for _ in range(total - sum(counts.values())):
        poorest = max(SPLITS, key=lambda name: owed[name])
        counts[poorest] += 1
        owed[poorest] -= 1
    return [counts[name] for name in SPLITS]


def _deal(ordered: list[tuple[bytes, int]], counts: list[int], rows: dict[str, list[int]]) -> None:
    start = border = 0
    for name, count in zip(SPLITS, counts, strict=True):
        border += count
        end = max(start, border)
        while 0 < end < len(ordered) and count and ordered[end][0] == ordered[end - 1][0]:
            end += 1  # equal examples stay together
        rows[name] += [row for _, row in ordered[start:end]]
        start = end


def divide(source: Path, target: Path, split: Split) -> None:
    """Divide ``x.npy`` and ``y.npy`` of ``source`` into ``<split>/x.npy`` and ``<split>/y.npy`` of ``target``.

    :raises DataError: the arrays are absent or do not fit each other.
    """
    x, y = read_arrays(source, mapped=True)
    labels = [int(label) for label in y]
    for name, rows in stratify(list(_keys(x, labels, split.seed)), labels, split).items():
        folder = target / name
        folder.mkdir(parents=True)
        _write_rows(folder / "x.npy", x, rows)
        _write_rows(folder / "y.npy", y.astype("<i8"), rows)


def _keys(x: Any, labels: list[int], seed: int) -> Iterator[bytes]:
    for image, label in zip(x, labels, strict=True):
        yield hashlib.sha256(b"%d %d " % (seed, label) + image.tobytes()).digest()


def _write_rows(path: Path, array: Any, rows: list[int]) -> None:
    """Write some rows of an array, in pieces: the array may be larger than memory."""
    from numpy.lib.format import open_memmap

    out = open_memmap(path, mode="w+", dtype=array.dtype, shape=(len(rows), *array.shape[1:]))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        piece = rows[start : start + _ROWS_AT_ONCE]
        out[start : start + len(piece)] = array[piece]
    out.flush()


def read_arrays(folder: Path, *, mapped: bool = False) -> tuple[Any, Any]:
    """Return ``x`` and ``y`` of a folder: real numbers, one label (an integer) to each row of ``x``.

    :param mapped: map the files instead of reading them.
    :raises DataError: a file is absent, is no such array, or they do not fit each other; with all that is wrong.
    """
    import numpy as np

    paths = [folder / "x.npy", folder / "y.npy"]
    hint = "An array dataset is x.npy (the examples) and y.npy (labels)."
    refuse([f"there is no {path}" for path in paths if not path.is_file()], hint)
    check_files({path.name: path for path in paths})
    arrays, problems = [], []
    for path in paths:
        try:
            arrays.append(np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False))
        except (ValueError, OSError, EOFError) as error:
            problems.append(f"{path} is not an array that can be read: {error}")
    refuse(problems)
    x, y = arrays
    if y.ndim != 1:
        raise DataError(f"{folder}: y.npy has shape {y.shape}; it needs one label for each row of x.npy, {x.shape}.")
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{folder / 'y.npy'} holds {y.dtype}; labels must be integers.")
    if y.dtype == np.uint64 and (highest := int(y.max())) > np.iinfo(np.int64).max:
        where = f"{folder / 'y.npy'} holds the label {highest} in row {y.argmax()}"
        raise DataError(f"{where}, more than a signed 64-bit integer holds.")
    return x, y


def load_split(
    folder: Path, split: str, labels: Sequence[int] | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return ``(x, y)`` of one split of a fetched dataset; ``y`` is int64.

    :param labels: keep only these labels; they become classes 0, 1, ... in this order.
    :raises DataError: there is no such split, its arrays are not usable, or a label is not in it.
    """
    import numpy as np

    known = sorted({path.parent.name for name in ("x", "y") for path in folder.glob(f"*/{name}.npy")})
    if split not in known:
        raise DataError(f"{folder} has no split {split!r}; it has {', '.join(known) or 'none'}.")
    x, y = read_arrays(folder / split)
    y = y.astype(np.int64)
    if labels is None:
        return x, y
    absent = sorted(set(labels) - set(y.tolist()))
    if absent:
        present = ", ".join(map(str, np.unique(y)[:20]))
        raise DataError(f"no example of {split!r} has label {', '.join(map(str, absent))}; it has {present}.")
    chosen = np.isin(y, labels)
    classes = {label: index for index, label in enumerate(labels)}
    return x[chosen], np.array([classes[label] for label in y[chosen].tolist()], dtype=np.int64)
