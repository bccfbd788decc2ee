"""Where the two environments are."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def control_bin() -> Path:
    """Return the folder of the control environment's programs."""
    return Path(os.environ.get("MXDIST_CONTROL_BIN") or REPOSITORY / ".mxdist/control/bin")


def node_python() -> Path:
    """Return the node environment's Python."""
    return Path(os.environ.get("MXDIST_NODE_PYTHON") or REPOSITORY / ".mxdist/node/bin/python")


def node_mpi_python() -> Path:
    """Return the Python of the node environment whose Horovod meets over MPI too."""
    return Path(os.environ.get("MXDIST_NODE_MPI_PYTHON") or REPOSITORY / ".mxdist/node-mpi/bin/python")
