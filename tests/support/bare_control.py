"""A control environment in which mxdist is not installed: for tests of the plugins folder alone."""

from __future__ import annotations

import shlex
import shutil
import venv
from pathlib import Path

from support.places import REPOSITORY


def bare_control(folder: Path, packages: Path) -> Path:
    """Make an environment with all packages of another one but mxdist, and return its ``bin`` folder.

    :param packages: the other's site-packages; its entries are linked to, not copied.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    own = next(folder.glob("lib/python3*/site-packages"))
    for entry in packages.iterdir():
        if "mxdist" not in entry.name and not (own / entry.name).exists():
            (own / entry.name).symlink_to(entry)
    program = folder / "bin" / "airflow"
    python = shlex.quote(str(folder / "bin" / "python"))
    program.write_text(f'#!/bin/sh\nexec {python} -m airflow "$@"\n')
    program.chmod(0o755)
    return folder / "bin"


def copy_of_plugins(target: Path) -> Path:
    """Copy the plugins folder without what an earlier installation left in it, which Airflow would believe."""
    shutil.copytree(REPOSITORY / "plugins", target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return target
