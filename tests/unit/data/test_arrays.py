"""Arrays that are not fit for training: each is named, all at once, and nothing is published."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.data.conftest import Place

from mxdist.data.arrays import no_classes, not_finite
from mxdist.data.split import load_split
from mxdist.errors import DataError
from mxdist.spec.dataset import Split

Fill = Callable[..., Path]


def npy(array: Any) -> bytes:
    """Return the bytes of an .npy file, as numpy writes it."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


X, Y = npy(np.ones((4, 2), np.float32)), npy(np.arange(4))

BROKEN = [
    pytest.param("x", npy(np.ones((4, 2), np.complex64)), "complex numbers (dtype", id="complex"),
    pytest.param("x", npy(np.array([{}] * 4, dtype=object)), "Python objects (dtype", id="objects"),
    pytest.param("x", npy(np.array(["a"] * 4)), "text (dtype", id="text"),
    pytest.param("x", npy(np.array([b"a"] * 4)), "text (dtype", id="bytes"),
    pytest.param("x", npy(np.zeros(4, dtype="M8[s]")), "dates (dtype", id="dates"),
    pytest.param("x", npy(np.zeros(4, dtype="m8[s]")), "time spans (dtype", id="spans"),
    pytest.param(
        "x", npy(np.zeros(4, dtype=[("a", "<f4"), ("b", "<i8")])), "records or raw bytes (dtype", id="records"
    ),
    pytest.param("x", b"", "is empty (0 bytes)", id="empty-file"),
    pytest.param("x", b"PK\3\4 and so on", "does not begin as .npy does", id="zip"),
    pytest.param("x", X[:60], "cut short inside its header", id="half-a-header"),
    pytest.param("x", X[:6], "cut short inside its header", id="magic-only"),
    pytest.param("x", X.replace(b"'shape'", b"'shade'"), "header that cannot be read", id="strange-header"),
    pytest.param("x", X.replace(b"(4, 2)", b"(-4,2)"), "header that cannot be read", id="negative-shape"),
    pytest.param("x", X[:-3], f"has {len(X) - 3} bytes, but its header promises {len(X)}", id="truncated"),
    pytest.param("x", X + b"12", f"has {len(X) + 2} bytes, but its header promises {len(X)}", id="too-long"),
    pytest.param("x", npy(np.ones((0, 2))), "holds nothing: its shape is (0, 2)", id="no-rows"),
    pytest.param("x", npy(np.ones((4, 0))), "holds nothing: its shape is (4, 0)", id="no-columns"),
    pytest.param("x", npy(np.float64(3)), "single number", id="scalar"),
    pytest.param("x", npy(np.ones((5, 2))), "has 5 rows, but y.npy beside it has 4", id="lengths"),
    pytest.param("y", Y[:-1], f"has {len(Y) - 1} bytes, but its header promises {len(Y)}", id="truncated-labels"),
    pytest.param("y", npy(np.arange(4) * 1j), "complex numbers (dtype", id="complex-labels"),
]


@pytest.mark.parametrize(("file", "data", "said"), BROKEN)
def test_staging_names_the_file_and_publishes_nothing(
    tmp_path: Path, fill: Fill, file: str, data: bytes, said: str
) -> None:
    place = Place(str(tmp_path / "store"))
    files = {"train/x.npy": X, "train/y.npy": Y, f"train/{file}.npy": data}
    with pytest.raises(DataError) as caught:
        place.stage(fill(files))
    assert f"train/{file}.npy " in str(caught.value)
    assert said in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("file", "data", "said"), BROKEN)
def test_reading_a_split_says_the_same(fill: Fill, file: str, data: bytes, said: str) -> None:
    folder = fill({"train/x.npy": X, "train/y.npy": Y, f"train/{file}.npy": data})
    with pytest.raises(DataError) as caught:
        load_split(folder, "train")
    assert f"train/{file}.npy " in str(caught.value)
    assert said in str(caught.value)


def test_all_problems_are_told_at_once(tmp_path: Path, fill: Fill) -> None:
    files = {
        "train/x.npy": b"",
        "train/y.npy": Y[:-1],
        "test/x.npy": X,
        "test/y.npy": npy(np.arange(3)),
        "note": b"fine",
    }
    with pytest.raises(DataError) as caught:
        Place(str(tmp_path / "store")).stage(fill(files))
    told = str(caught.value)
    assert "3 problems" in told
    assert all(name in told for name in ("train/x.npy is empty", "train/y.npy has", "test/x.npy has 4 rows"))
    assert "note" not in told


def test_what_is_no_example_may_be_any_array(tmp_path: Path, fill: Fill) -> None:
    """Files beside the arrays are the business of a recipe; but a torn file is of use to nobody."""
    place = Place(str(tmp_path / "store"))
    names, several = npy(np.array(["cat", "dog"])), X + X  # np.save twice into one file
    record = npy(np.zeros(2, dtype=[("FOO", "<f4")]))
    staged = place.stage(fill({"names.npy": names, "several.npy": several, "r.npy": record, "e.npy": npy(np.ones(0))}))
    assert staged["files"] == 4
    with pytest.raises(DataError, match=r"names\.npy has .* bytes, but its header promises"):
        place.stage(fill({"names.npy": names[:-1]}))


@pytest.mark.parametrize("kind", ["bool", "float16", "float64", ">f4", "uint64", "int8", "longdouble"])
def test_every_real_number_is_welcome(tmp_path: Path, fill: Fill, kind: str) -> None:
    x = np.ones((4, 2), dtype=kind)
    for order in (x, np.asfortranarray(x)):
        staged = Place(str(tmp_path / "store")).stage(fill({"train/x.npy": npy(order), "train/y.npy": Y}))
        assert staged["rows"] == 4


def test_a_headers_second_and_third_version_are_read(tmp_path: Path, fill: Fill) -> None:
    files = {}
    for number in (2, 3):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.ones((4, 2)), version=(number, 0))
        files |= {f"{number}/x.npy": stream.getvalue(), f"{number}/y.npy": Y}
    assert Place(str(tmp_path / "store")).stage(fill(files))["rows"] == 8


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train/x.npy": X}, "there is no .*train/y.npy"),
        ({"train/y.npy": Y}, "there is no .*train/x.npy"),
        ({"train/x.npy": X, "train/y.npy": npy(np.ones((4, 1), int))}, r"y.npy has shape \(4, 1\)"),
        ({"train/x.npy": X, "train/y.npy": npy(np.arange(4, dtype="u8") + np.uint64(2**63))}, "in row 3, more than"),
    ],
)
def test_a_split_with_a_part_missing_or_odd_says_which(fill: Fill, files: dict[str, bytes], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load_split(fill(files), "train")


def test_a_split_to_divide_is_checked_alike(tmp_path: Path, fill: Fill) -> None:
    place = Place(str(tmp_path / "store"))
    with pytest.raises(DataError, match="2 problems") as caught:
        place.stage(fill({"x.npy": npy(np.ones((4, 2), complex)), "y.npy": b""}), split=Split())
    assert "x.npy holds complex numbers" in str(caught.value)
    assert "y.npy is empty" in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("array", "dtype", "said"),
    [
        (np.array([[1.0, 2], [3, np.nan]]), "float32", "nan in row 1"),
        (np.array([1.0, -np.inf]), "float64", "-inf in row 1"),
        (np.array([1e39, 1]), "float32", "row 0, which is not finite in float32"),
        (np.array([1e39, 1]), "float64", ""),
        (np.array([2**63], dtype="u8"), "float32", ""),
    ],
)
def test_the_first_value_that_is_not_finite_has_its_row(array: Any, dtype: str, said: str) -> None:
    found = not_finite(array, dtype)
    assert said in found
    assert bool(found) == bool(said)


def test_rows_are_counted_through_large_arrays() -> None:
    x = np.zeros((5, 1 << 20))  # 8 MiB a row
    x[4, 7] = np.nan
    assert "nan in row 4" in not_finite(x, "float64")


@pytest.mark.parametrize(
    ("y", "outputs", "learnt", "said"),
    [
        (np.array([0, 1, 2]), 3, False, ""),
        (np.array([0.0, 1.0]), None, True, ""),
        (np.array([0, -1]), None, True, "label -1 in row 1; classes are numbered from 0"),
        (np.array([0, 1.5]), None, True, "1.5 in row 1; the label of a class is a whole number"),
        (np.array([0, 3]), 3, False, "label 3 in row 1, but the network has 3 outputs"),
        (np.array([0, 2**24]), None, False, ""),
        (np.array([0, 2**24 + 1]), None, False, "float32 keeps whole numbers up to 16777216 apart"),
        (np.array([0, 2**64 - 1], dtype="u8"), None, True, "label 18446744073709551615 in row 1"),
        (np.array([0, 1_000_000]), None, True, "that would be 1000001 outputs"),
        (np.array([0, 1_000_000]), None, False, ""),
        (np.array([[0, 1], [2, -3]]), None, True, "label -3 in row 1"),
    ],
)
def test_labels_of_classes(y: Any, outputs: int | None, learnt: bool, said: str) -> None:
    found = no_classes(y, "float32", outputs=outputs, learnt=learnt)
    assert said in found
    assert bool(found) == bool(said)
