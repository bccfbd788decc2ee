"""CIFAR-10 in its own binary format: every byte where the format says it is."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from unit.data.conftest import Place

from mxdist.data.cifar import fill as fill_arrays
from mxdist.data.sources import open_source
from mxdist.errors import DataError
from mxdist.store import open_store

RECORD = 3073


def record(label: int, seed: int) -> bytes:
    """Return one record, written byte by byte as the format's page says."""
    out = io.BytesIO(bytes([label]))
    out.seek(1)
    for channel in range(3):
        for row in range(32):
            for column in range(32):
                out.write(bytes([(seed + 7 * channel + 3 * row + column) % 256]))
    return out.getvalue()


def batches(prefix: str = "") -> dict[str, bytes]:
    return {
        f"{prefix}data_batch_1.bin": record(3, 1) + record(9, 2),
        f"{prefix}data_batch_2.bin": record(0, 3),
        f"{prefix}test_batch.bin": record(5, 4),
        f"{prefix}batches.meta.txt": b"airplane\nautomobile\n",
        f"{prefix}readme.html": b"<html>",
    }


@pytest.mark.parametrize("prefix", ["", "cifar-10-batches-bin/"])
def test_arrays_are_what_the_records_say(fill: Callable[..., Path], prefix: str) -> None:
    with open_source(f"cifar10:{fill(batches(prefix))}", None) as folder:
        x, y = np.load(folder / "train/x.npy"), np.load(folder / "train/y.npy")
        test_x, test_y = np.load(folder / "test/x.npy"), np.load(folder / "test/y.npy")
    assert (x.shape, x.dtype, y.dtype) == ((3, 3, 32, 32), np.uint8, np.int64)
    assert y.tolist() == [3, 9, 0]
    assert test_y.tolist() == [5]
    assert x[1, 2, 30, 31] == (2 + 7 * 2 + 3 * 30 + 31) % 256
    assert test_x[0, 1, 0, 5] == (4 + 7 + 5) % 256


def test_from_a_bucket(s3: Place, fill: Callable[..., Path], tmp_path: Path) -> None:
    store = open_store(f"{s3.uri}/raw", endpoint_url=s3.endpoint_url, credentials=s3.credentials)
    for name, data in batches().items():
        store.write(name, data)
    from_s3 = s3.stage(f"cifar10:{s3.uri}/raw", "a")
    from_folder = s3.stage(f"cifar10:{fill(batches())}", "b")
    assert from_s3["version"] == from_folder["version"]
    assert from_s3["rows"] == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_batch_2.bin": b"x" * (RECORD - 1)}, "data_batch_2.bin has 3072 bytes"),
        ({"data_batch_2.bin": b""}, "data_batch_2.bin has 0 bytes"),
        ({"test_batch.bin": bytes([10]) + b"x" * (RECORD - 1)}, "label 10 in record 0"),
    ],
)
def test_damaged(fill: Callable[..., Path], tmp_path: Path, changes: dict[str, bytes], words: str) -> None:
    store = open_store(str(fill({**batches(), **changes})))
    with pytest.raises(DataError, match=words):
        fill_arrays(tmp_path, store)
    assert not (tmp_path / "train").exists()


def test_everything_absent_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"a pickle of the Python version")
    with (
        pytest.raises(DataError, match=r"no data_batch_1.bin; there is no test_batch.bin.*[\s\S]*binary version"),
        open_source(f"cifar10:{tmp_path}", None),
    ):
        pass
