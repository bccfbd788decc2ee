"""Hold the place of one rank in an MPI world: ``python -m mxdist.runtime.mpi_place``, started by mpirun.

mpirun starts one of these for each rank, on the rank's host, and tells it by its environment where the rank stands and
where MPI's server is. It writes that down for the supervisor, who starts the rank itself with it, as a rank of any
other world: with its own log and cores, tied to the supervisor, with an exit code that nobody translates. MPI's server
asks a process for its rank, not for its parent. The holder stays until it is told to go, for mpirun ends when its last
one does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from mxdist.runtime.parent import die_with_parent

FOLDER_NAME = "OMPI_MCA_orte_tmpdir_base"
"""The variable that says where Open MPI makes its session folders."""

END_FILE = "mpi.end"
"""The file of a world that tells the holders to go: all ranks have ended."""

_SEGMENTS_NAME = "OMPI_MCA_btl_vader_backing_directory"
_GIVEN = ("OMPI_", "PMIX_")
_MEMORY = Path("/dev/shm")  # noqa: S108  # the folder below is ours alone
_LOOK_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def main() -> NoReturn:
    """Write the place down, tell when the rank has come, and stay."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    die_with_parent(signal.SIGUSR1)
    folder = shared_folder(os.environ)
    folder.mkdir(mode=0o700, exist_ok=True)
    world = Path(os.environ["MXDIST_WORLD_DIR"])
    given = {name: value for name, value in os.environ.items() if name.startswith(_GIVEN)}
    rank = int(given["OMPI_COMM_WORLD_RANK"])
    place = {"rank": rank, "environment": {**given, _SEGMENTS_NAME: str(folder)}, "joined": False}
    _write(world, rank, place)
    came = _session(given, rank)
    while not _told_to_go() and not (world / END_FILE).exists():
        if not place["joined"] and came.exists():
            place["joined"] = True
            _write(world, rank, place)
    shutil.rmtree(folder, ignore_errors=True)  # what the ranks shared goes with the first holder that leaves
    os._exit(0)  # end well, so that mpirun does


def _told_to_go() -> bool:
    """Wait a moment; return whether mpirun or its daemon said so, or is gone.

    When a job is asked to stop, all its processes get a TERM; that one is not meant: the ranks still need their places.
    """
    told = signal.sigtimedwait(_SIGNALS, _LOOK_S)
    return told is not None and (told.si_signo == signal.SIGUSR1 or told.si_pid == os.getppid())


def place_file(world: Path, rank: int) -> Path:
    """Return where the place of a rank is written down."""
    return world / f"rank-{rank}.place.json"


def shared_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in the memory of a host where Open MPI keeps the session and what ranks share.

    It is called the same on all hosts of a world, and does not give the token away.
    """
    token = environment.get("MXDIST_TOKEN", "").partition(".")[0]  # agents add the number of their host
    of_world = f"{token}/{environment.get('MXDIST_INCARNATION')}" if token else environment["MXDIST_WORLD_DIR"]
    digest = hashlib.sha256(os.fsencode(of_world)).hexdigest()
    return (_MEMORY if _MEMORY.is_dir() else Path("/tmp")) / f"mxdist-{digest[:16]}"  # noqa: S108


def sweep(token: str, worlds: Iterable[int]) -> None:
    """Remove what the processes of worlds shared in the memory of this host; all of them have ended."""
    for world in worlds:
        folder = shared_folder({"MXDIST_TOKEN": token, "MXDIST_INCARNATION": str(world)})
        shutil.rmtree(folder, ignore_errors=True)


def _session(given: Mapping[str, str], rank: int) -> Path:
    """Return the folder that a rank makes as soon as it calls ``MPI_Init``."""
    job = int(given["OMPI_MCA_ess_base_jobid"]) & 0xFFFF
    return Path(given["OMPI_MCA_orte_jobfam_session_dir"]) / str(job) / str(rank)


def _write(world: Path, rank: int, place: Mapping[str, object]) -> None:
    path = place_file(world, rank)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(place), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
