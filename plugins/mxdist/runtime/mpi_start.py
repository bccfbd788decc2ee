"""Become ``mpirun``, or its daemon on another host: ``python -m mxdist.runtime.mpi_start mpirun ...``.

When the supervisor dies, or the agent, the kernel sends it a TERM, on which it ends what it started. Its session
folders lie in the memory of the host, in a folder of the world's own, so that a mpirun that was killed leaves nothing
that cannot be found.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mxdist.environment import SECRET_NAMES
from mxdist.runtime import exit_codes
from mxdist.runtime.mpi_place import FOLDER_NAME, shared_folder
from mxdist.runtime.parent import die_with_parent

NOT_THERE = (
    "{name} is not on the PATH of this host. Install Open MPI (Debian: openmpi-bin) and a Horovod that was built with "
    "HOROVOD_WITH_MPI=1, or set parallelism.controller to gloo."
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Become the command that the arguments say."""
    command = list(sys.argv[1:] if arguments is None else arguments)
    die_with_parent(signal.SIGTERM)
    found = shutil.which(command[0])
    if found is None:
        print(NOT_THERE.format(name=command[0]), file=sys.stderr, flush=True)
        sys.exit(exit_codes.USER_ERROR)
    folder = shared_folder(os.environ)
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in SECRET_NAMES:  # ranks get them from the supervisor
        os.environ.pop(name, None)
    os.environ |= {FOLDER_NAME: str(folder), "OMPI_MCA_plm_rsh_agent": _reach(folder), **_as_root()}
    os.execv(found, command)


def _reach(folder: Path) -> str:
    """Return the command that mpirun starts its daemons by; it must not hold a blank in any word."""
    script = folder / "reach"
    script.write_text(f'exec {shlex.quote(sys.executable)} -m mxdist.runtime.mpi_reach "$@"\n')
    return f"sh {script}"


def _as_root() -> dict[str, str]:
    """Return what lets root run mpirun, for root only; in containers it is the usual user."""
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return dict.fromkeys(names, "1") if os.getuid() == 0 else {}


if __name__ == "__main__":
    main()
