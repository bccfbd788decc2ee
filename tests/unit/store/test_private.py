"""What is written on this machine is for this user alone, whatever the umask says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mxdist.private import make_private
from mxdist.store import open_store


@pytest.fixture(autouse=True)
def open_to_all() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_dir()}


def test_folders_above_are_private_too(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b" / "c")
    assert modes(tmp_path) == {0o700}
    make_private(tmp_path / "a" / "b" / "c")


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    make_private(tmp_path / "shared" / "mine")
    assert modes(tmp_path) == {0o755, 0o700}


def test_a_run_store_is_private(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "state" / "runs"))
    store.write("key/attempts/0000000001.json", b"{}")
    store.create("key/0000000001/state.json", b"{}")
    assert modes(tmp_path) == {0o700}
