"""Ranks over MPI, in the node environment whose Horovod has it. MXNet is imported here, once: see unit/runtime."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from world.conftest import Jobs, jobs_in

from mxdist.runtime.mpi_place import shared_folder

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
    with jobs_in(tmp_path, controller="mpi", python=sys.executable) as found:
        yield found
    assert not [path for attempt in found.attempts for path in shared_by(attempt.claim.token) if path.exists()]


def shared_by(token: str) -> list[Path]:
    """Return where the worlds of an attempt would share something in the memory of this host."""
    return [shared_folder({"MXDIST_TOKEN": token, "MXDIST_INCARNATION": str(world)}) for world in range(1, 10)]
