"""What the machine must bring, checked all at once."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PYTHON = (3, 11)
_DISK_GB = 4
_LIBRARIES = {"libgomp.so.1": "libgomp1", "libquadmath.so.0": "libquadmath0", "libstdc++.so.6": "libstdc++6"}


@dataclass(frozen=True)
class Missing:
    """One thing that is not there, why it is needed, and Debian's package for it, if that brings it."""

    what: str
    why: str
    package: str = ""


def find_python() -> str | None:
    """Return a Python 3.11, or None. ``MXDIST_PYTHON`` names one that is not on the PATH."""
    names = [os.environ.get("MXDIST_PYTHON", ""), "python3.11", "python3", "/usr/bin/python3.11"]
    return next((name for name in names if name and _version(name) == PYTHON), None)


def _version(python: str) -> tuple[int, int] | None:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=True).stdout
        major, minor = answer.split()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None  # not there, or a shim that leads nowhere
    return int(major), int(minor)


def _has_venv(python: str) -> bool:
    """Return whether ``python -m venv`` can bring pip; Debian keeps that in a package of its own."""
    return subprocess.call([python, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL) == 0


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def missing(folder: Path, *, compiler: bool, uv: str | None) -> list[Missing]:
    """Return everything that is missing on this machine.

    :param compiler: Horovod must be built.
    :param uv: uv, if it is there already; it can bring a Python of its own.
    """
    found = []
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        found.append(Missing(f"Linux on x86-64 (this is {platform.system()} on {platform.machine()})", "mxnet 1.9.1"))
    python = find_python()
    if python is None and uv is None:
        found.append(Missing("Python 3.11", "both environments", "python3.11 python3.11-venv"))
    elif python is not None and uv is None and not _has_venv(python):
        found.append(Missing("Python's venv module", "to bring uv", "python3.11-venv"))
    if compiler and not (shutil.which(os.environ.get("CXX", "g++"))):
        found.append(Missing("a C++ compiler", "to build Horovod", "g++"))
    if compiler and not shutil.which("make"):
        found.append(Missing("make", "to build Horovod", "make"))
    for library, package in _LIBRARIES.items():
        if not _has_library(library):
            found.append(Missing(library, "mxnet", package))
    return found + _missing_disk(folder)


def missing_mpi() -> list[Missing]:
    """Return what is missing to build Horovod for MPI, and to run it."""
    found = []
    if not shutil.which("mpicxx"):
        found.append(Missing("Open MPI's compiler (mpicxx)", "Horovod over MPI", "libopenmpi-dev"))
    if not shutil.which("mpirun"):
        found.append(Missing("Open MPI's starter (mpirun)", "Horovod over MPI", "openmpi-bin"))
    return found


def _missing_disk(folder: Path) -> list[Missing]:
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb >= _DISK_GB:
        return []
    return [Missing(f"{_DISK_GB} GB of disk ({free_gb:.1f} GB are free in {folder})", "environments and state")]


def report(found: list[Missing]) -> str:
    """Return what is missing and the one line that brings it."""
    lines = ["This machine lacks:"]
    lines += [f"  - {item.what} (for {item.why})" for item in found]
    packages = " ".join(dict.fromkeys(item.package for item in found if item.package))
    if packages:
        lines += ["On Debian and its kin this brings it:", f"  sudo apt-get install -y {packages}"]
    return "\n".join(lines)
