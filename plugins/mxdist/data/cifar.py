"""CIFAR-10 in its own binary format, read from a folder or from S3.

Each record has 3,073 bytes: one byte for the label, then 1,024 bytes each of red, green and blue, row by row (the
"binary version" that https://www.cs.toronto.edu/~kriz/cifar.html describes). The training records lie in
``data_batch_1.bin`` to ``data_batch_5.bin``, the test records in ``test_batch.bin``; the "Python version" is pickles,
and is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mxdist.errors import DataError
from mxdist.store.base import Store

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SHAPE = (3, 32, 32)
CLASSES = 10
_RECORD_BYTES = 1 + 3 * 32 * 32
_TRAIN, _TEST = "data_batch_", "test_batch.bin"


def fill(folder: Path, store: Store) -> None:
    """Write CIFAR-10 into ``folder`` as arrays: train and test, x (n, 3, 32, 32) uint8, y (n,) int64.

    :param store: the folder or prefix that holds the ``.bin`` files, or holds ``cifar-10-batches-bin/`` with them.
    :raises DataError: files are absent or damaged; all of them are named.
    """
    import numpy as np

    keys = _keys(store)
    splits = {
        "train": [key for key in keys if _name(key).startswith(_TRAIN)],
        "test": [key for key in keys if _name(key) == _TEST],
    }
    contents = {key: store.read(key) for chosen in splits.values() for key in chosen}
    _check(store, splits, contents)
    for split, chosen in splits.items():
        x, y = _arrays([contents[key] for key in chosen])
        (folder / split).mkdir()
        np.save(folder / split / "x.npy", x)
        np.save(folder / split / "y.npy", y)


def _keys(store: Store) -> list[str]:
    """Return the ``.bin`` files, in order; those of the archive's own folder if they lie in one."""
    return sorted(entry.key for entry in store.list() if entry.key.endswith(".bin") and entry.key.count("/") <= 1)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _check(store: Store, splits: dict[str, list[str]], contents: dict[str, bytes]) -> None:
    problems = [
        f"there is no {what}" for split, what in (("train", f"{_TRAIN}1.bin"), ("test", _TEST)) if not splits[split]
    ]
    for key, data in contents.items():
        if not data or len(data) % _RECORD_BYTES:
            problems.append(f"{key} has {len(data)} bytes, not a multiple of {_RECORD_BYTES}")
        elif max(data[::_RECORD_BYTES]) >= CLASSES:
            record = next(i for i, label in enumerate(data[::_RECORD_BYTES]) if label >= CLASSES)
            problems.append(f"{key} has the label {data[record * _RECORD_BYTES]} in record {record}")
    if problems:
        raise DataError(
            f"{store.uri} does not hold CIFAR-10: {'; '.join(problems)}.",
            hint="Unpack the binary version, cifar-10-binary.tar.gz; the Python version is not read.",
        )


def _arrays(contents: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    import numpy as np

    records = np.frombuffer(b"".join(contents), dtype=np.uint8).reshape(-1, _RECORD_BYTES)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype("<i8")
