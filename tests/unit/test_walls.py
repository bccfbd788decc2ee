"""The walls between the rooms stop what they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import mxdist

REPOSITORY = Path(__file__).parents[2]
PACKAGE = Path(mxdist.__file__).parent
ROOMS = sorted(path.stem for path in PACKAGE.iterdir() if path.stem not in {"__init__", "__pycache__", "py", "runtime"})
SHARED = ["channel", "nics", "probe", "ssh_channel"]


def contract(name: str) -> dict[str, Any]:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    (found,) = (one for one in settings["tool"]["importlinter"]["contracts"] if one["name"] == name)
    return dict(found)


def broken(tmp_path: Path, seeds: dict[str, str]) -> str:
    """Return what import-linter says when these lines stand at the end of these files."""
    shutil.copytree(PACKAGE, tmp_path / "mxdist", ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in seeds.items():
        with (tmp_path / "mxdist" / file).open("a", encoding="utf-8") as module:
            module.write(f"\n{line}\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    command += ["--config", str(REPOSITORY / "pyproject.toml")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == (1 if seeds else 0), done.stdout + done.stderr
    return done.stdout


def test_package_keeps_the_walls(tmp_path: Path) -> None:
    assert " 0 broken" in broken(tmp_path, {})


def test_no_room_may_import_the_node_side(tmp_path: Path) -> None:
    """What is shared too: only preflight, in ``launch``, talks to hosts as a supervisor does."""
    files = {room: f"{room}/__init__.py" if (PACKAGE / room).is_dir() else f"{room}.py" for room in ROOMS}
    said = broken(tmp_path, {file: "from mxdist.runtime import exit_codes" for file in files.values()})
    for room in ROOMS:
        assert f"mxdist.{room} is not allowed to import mxdist.runtime:" in said, room


@pytest.mark.parametrize("shared", SHARED)
def test_only_launch_may_import_what_it_shares_with_the_node_side(tmp_path: Path, shared: str) -> None:
    said = broken(tmp_path, {"tracking/params.py": f"from mxdist.runtime import {shared}"})
    assert "mxdist.tracking is not allowed to import mxdist.runtime:" in said


def test_arrows_of_the_face_point_down(tmp_path: Path) -> None:
    assert "mxdist.hooks is not allowed to import mxdist.listeners" in broken(
        tmp_path, {"hooks/mlflow.py": "from mxdist import listeners"}
    )


def test_every_room_has_its_wall() -> None:
    """A new room stands in the contract before it is used."""
    assert sorted(contract("The node side is started, never imported")["source_modules"]) == [
        f"mxdist.{room}" for room in ROOMS
    ]
