"""Splits: stratified, the same everywhere, without leaks; and reading them back."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.conftest import PLUGINS, Place, content

from mxdist.data.split import SPLITS, divide, load_split, stratify
from mxdist.errors import DataError
from mxdist.spec.dataset import Split
from support.places import control_bin, node_python

DEFAULT = Split.parse({})


def keys_of(labels: list[int]) -> list[bytes]:
    return [hashlib.sha256(b"%d" % row).digest() for row in range(len(labels))]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=20, max_size=300),
    st.sampled_from([(0.7, 0.15, 0.15), (0.8, 0.2, 0.0), (1.0, 0.0, 0.0), (0.1, 0.1, 0.8), (0.34, 0.33, 0.33)]),
)
def test_every_example_is_in_one_split_and_shares_are_right(labels: list[int], shares: tuple[float, ...]) -> None:
    split = Split.parse(dict(zip(SPLITS, shares, strict=True)))
    rows = stratify(keys_of(labels), labels, split)
    assert sorted(row for found in rows.values() for row in found) == list(range(len(labels)))
    for name, share in zip(SPLITS, shares, strict=True):
        found = rows.get(name, [])
        assert abs(len(found) - share * len(labels)) < 2
        counts = Counter(labels[row] for row in found)
        for label, total in Counter(labels).items():
            assert abs(counts[label] - share * total) < 2
        assert bool(found) == bool(share)


def test_many_small_classes_still_fill_every_split() -> None:
    labels = [row // 2 for row in range(200)]
    rows = stratify(keys_of(labels), labels, DEFAULT)
    assert [len(rows[name]) for name in SPLITS] == [140, 30, 30]


def test_equal_examples_stay_together() -> None:
    labels = [0] * 90
    keys = [hashlib.sha256(b"%d" % (row // 3)).digest() for row in range(90)]
    rows = stratify(keys, labels, DEFAULT)
    where = {name: {keys[row] for row in found} for name, found in rows.items()}
    assert not where["train"] & where["test"]
    assert not where["train"] & where["validation"]
    assert not where["validation"] & where["test"]


def test_the_order_of_the_rows_does_not_matter() -> None:
    labels = [row % 3 for row in range(100)]
    keys = keys_of(labels)
    rows = stratify(keys, labels, DEFAULT)
    turned = stratify(keys[::-1], labels[::-1], DEFAULT)
    assert {name: [keys[row] for row in found] for name, found in rows.items()} == {
        name: [keys[99 - row] for row in found] for name, found in turned.items()
    }


def test_new_examples_move_few_of_the_old() -> None:
    labels = [0] * 1100
    keys = keys_of(labels)
    before, after = stratify(keys[:1000], labels[:1000], DEFAULT), stratify(keys, labels, DEFAULT)
    tested = set(before["test"])
    assert len(tested & set(after["train"])) == 0
    assert len(tested & set(after["test"])) > 0.8 * len(tested)


def test_labels_are_mixed_within_a_split() -> None:
    labels = [row // 100 for row in range(1000)]
    train = stratify(keys_of(labels), labels, DEFAULT)["train"]
    assert len({labels[row] for row in train[:50]}) >= 8


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(DataError, match="3 examples are too few: the"):
        stratify(keys_of([0, 0, 0]), [0, 0, 0], Split.parse({"train": 0.9, "validation": 0.05, "test": 0.05}))


def write_arrays(folder: Path, rows: int = 200, kind: str = "uint8") -> Path:
    """Write numbers that no random generator had a part in."""
    folder.mkdir(parents=True)
    values = [(row * 2654435761 + place * 40503) % 251 for row in range(rows) for place in range(12)]
    np.save(folder / "x.npy", np.array(values, dtype=kind).reshape(rows, 3, 2, 2))
    np.save(folder / "y.npy", np.array([row % 4 for row in range(rows)]))
    return folder


@pytest.mark.parametrize("kind", ["uint8", "float32", "float64", "int16"])
def test_divided_arrays_hold_each_row_once_with_its_label(tmp_path: Path, kind: str) -> None:
    source = write_arrays(tmp_path / "source", rows=3000, kind=kind)
    divide(source, tmp_path / "out", DEFAULT)
    x, y = np.load(source / "x.npy"), np.load(source / "y.npy")
    wanted = Counter((row.tobytes(), int(label)) for row, label in zip(x, y, strict=True))
    found: Counter[tuple[bytes, int]] = Counter()
    for name in SPLITS:
        part_x, part_y = load_split(tmp_path / "out", name)
        assert part_x.dtype == x.dtype
        assert part_y.dtype == np.int64
        found.update((row.tobytes(), int(label)) for row, label in zip(part_x, part_y, strict=True))
    assert found == wanted


def test_the_seed_decides(tmp_path: Path) -> None:
    source = write_arrays(tmp_path / "source")
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        divide(source, tmp_path / place, Split.parse({"seed": seed}))
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert content(tmp_path / "a") != content(tmp_path / "c")


PROGRAM = """
import json, sys, numpy
from mxdist.data.stage import stage
from mxdist.spec.dataset import Split
staged = stage(sys.argv[1], sys.argv[2], "data", split=Split.parse({"seed": 3}))
print(json.dumps([numpy.__version__, staged["version"]]))
"""


def _staged_by(python: Path, source: str, store: Path, hash_seed: str) -> Any:
    environment = {"PYTHONPATH": str(PLUGINS), "PYTHONHASHSEED": hash_seed}
    command = [str(python), "-c", PROGRAM, source, str(store)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("source", ["arrays", "mnist5k"])
def test_both_environments_make_the_same_version(tmp_path: Path, source: str) -> None:
    """numpy 1.23 on the nodes, numpy 2 on the control side: the same rows, in files with the same bytes."""
    place = str(write_arrays(tmp_path / "arrays")) if source == "arrays" else source
    control = _staged_by(control_bin() / "python", place, tmp_path / "control", "1")
    node = _staged_by(node_python(), place, tmp_path / "node", "2")
    assert (control[0].split(".")[0], node[0].split(".")[:2]) == ("2", ["1", "23"])
    assert control[1] == node[1]


def test_labels_become_classes_in_the_given_order(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    np.save(tmp_path / "test" / "x.npy", np.arange(6).reshape(6, 1))
    np.save(tmp_path / "test" / "y.npy", np.array([7, 5, 3, 5, 7, 9], dtype=np.uint8))
    x, y = load_split(tmp_path, "test", (7, 5))
    assert x.tolist() == [[0], [1], [3], [4]]
    assert y.tolist() == [0, 1, 1, 0]
    assert y.dtype == np.int64
    whole_x, whole_y = load_split(tmp_path, "test")
    assert (whole_x[:, 0].tolist(), whole_y.tolist()) == ([0, 1, 2, 3, 4, 5], [7, 5, 3, 5, 7, 9])


@pytest.mark.parametrize(
    ("split", "labels", "said"),
    [
        ("tset", None, "has no split 'tset'; it has test, train"),
        ("test", (1, 44), "has label 44; it has 0, 1"),
        ("broken", None, "has no split"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, split: str, labels: tuple[int, ...] | None, said: str) -> None:
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.zeros((2, 1)))
        np.save(tmp_path / name / "y.npy", np.array([0, 1]))
    with pytest.raises(DataError, match=said):
        load_split(tmp_path, split, labels)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (
            np.zeros((3, 1)),
            np.zeros(2, int),
            "has 3 rows, but y.npy beside it has 2; they need the same number of rows",
        ),
        (np.zeros((2, 1)), np.zeros((2, 1), int), "it needs one label for each row"),
        (np.zeros((2, 1)), np.zeros(2), "labels must be integers"),
        (None, np.zeros(2, int), "there is no .*x.npy"),
        (b"", np.zeros(2, int), "x.npy is empty"),
        (b"\x93NUMPY\x01\x00", np.zeros(2, int), "x.npy is cut short"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(place: Place, tmp_path: Path, x: Any, y: Any, said: str) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    np.save(folder / "y.npy", y)
    if isinstance(x, bytes):
        (folder / "x.npy").write_bytes(x)
    elif x is not None:
        np.save(folder / "x.npy", x)
    with pytest.raises(DataError, match=said):
        place.stage(folder, split=DEFAULT)
    assert place.keys() == []
