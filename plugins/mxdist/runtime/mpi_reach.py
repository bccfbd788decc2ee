"""What mpirun takes for its ``ssh``: ``python -m mxdist.runtime.mpi_reach HOST COMMAND...``, run beside the supervisor.

It hands the command over to the supervisor, which has a way to every host already, whatever the platform. So mpirun
needs no keys, and no daemon is started that the guard of its host does not know.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxdist.runtime.place import read_json, replace_file


def main() -> None:
    """Write the command down; whether it works, mpirun learns from the daemon itself."""
    host, *words = sys.argv[1:]
    name = hashlib.sha256(host.encode()).hexdigest()[:16]
    path = Path(os.environ["MXDIST_WORLD_DIR"]) / f"mpi-daemon-{name}.json"
    replace_file(path, json.dumps({"host": host, "command": " ".join(words)}).encode())


def wanted(world: Path, python: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the address of each host where mpirun wants a daemon, and the daemon's command.

    :param python: of the hosts.
    """
    for path in sorted(world.glob("mpi-daemon-*.json")):
        told: dict[str, Any] = read_json(path)
        command = str(told["command"]).strip()
        become = f"exec {command}" if command.startswith("orted ") else command
        yield str(told["host"]), (python, "-m", "mxdist.runtime.mpi_start", "/bin/sh", "-c", become)


if __name__ == "__main__":
    main()
