"""The public names of each room are the ones that it lists, in order."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("room", ["mxdist.spec", "mxdist.store"])
def test_all_is_sorted_and_complete(room: str) -> None:
    module = importlib.import_module(room)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not type(value).__name__ == "module" and name != "annotations"
    }
    assert sorted(module.__all__) == sorted(public)
