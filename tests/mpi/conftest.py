"""Ranks over MPI, in the node environment whose Horovod has it. MXNet is imported here, once: see unit/runtime."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from world.conftest import Jobs, jobs_in

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import mxnet  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    """Let MXNet look for ``scipy.sparse.csr`` whenever it makes an array."""
    config.addinivalue_line("filterwarnings", "ignore:Please import `csr_matrix` from:DeprecationWarning")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs of one test, whose ranks meet over MPI; at its end nothing of them is left in the memory of this host."""
    monkeypatch.delenv("MXDIST_WORKDIR", raising=False)
    before = shared()
    with jobs_in(tmp_path, controller="mpi", python=sys.executable) as found:
        yield found
    assert shared() <= before


def shared() -> set[Path]:
    """Return what worlds over MPI share in the memory of this host."""
    return set(Path("/dev/shm").glob("mxdist-*"))  # noqa: S108
