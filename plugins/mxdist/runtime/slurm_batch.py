"""The first thing of mxdist that runs in a Slurm job: it learns what only the allocation knows, and becomes supervisor.

This file is self-contained: the batch script holds its text as the first frame of Python's standard input. Two more
frames follow: the document for ``bootstrap.py``, and that file's text. Added to the document are the names of the
nodes, which of them this is, and the secrets, which sbatch has put into the environment of the job and nowhere else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, MutableMapping
from typing import Any

_KEPT = ("SLURM_", "SLURMD_")
_EXPAND_S = 60


def main(frame: Callable[[], bytes], environment: MutableMapping[str, str]) -> None:
    """Become the supervisor. Does not return."""
    document: dict[str, Any] = json.loads(frame())
    source = frame()
    document = complete(document, environment, expand(environment["SLURM_JOB_NODELIST"]))
    bootstrap = types.ModuleType("mxdist_bootstrap")
    exec(compile(source, "mxdist-bootstrap", "exec"), bootstrap.__dict__)  # noqa: S102
    bootstrap.begin(document)


def complete(document: dict[str, Any], environment: MutableMapping[str, str], hosts: list[str]) -> dict[str, Any]:
    """Return the document with what the allocation says; the secrets leave the environment.

    ``again`` tells the supervisor how claims begin that earlier runs of this very Slurm job have made: they are over,
    for Slurm starts a job again only when it has ended.
    """
    secrets = {name: environment.pop(name) for name in document.pop("secret_names") if environment.get(name)}
    environment.pop("SLURM_EXPORT_ENV", None)  # else every srun hands on those alone
    job, restart = environment["SLURM_JOB_ID"], environment.get("SLURM_RESTART_COUNT") or "0"
    return {
        **document,
        "secrets": secrets,
        "hosts": hosts,
        "here": environment.get("SLURMD_NODENAME"),
        "nonce": f"slurm-{job}-{restart}",
        "again": f"secrets-slurm-{job}-",
        "environment": {
            **document["environment"],
            **{name: value for name, value in environment.items() if name.startswith(_KEPT)},
        },
    }


def expand(nodelist: str) -> list[str]:
    """Return the names that a node list stands for: ``node[1-3]``."""
    command = ["scontrol", "show", "hostnames", nodelist]
    return subprocess.run(command, capture_output=True, text=True, timeout=_EXPAND_S, check=True).stdout.split()


def read_frame() -> bytes:
    """Return the next frame of standard input."""
    file = open(0, "rb", 0, closefd=False)  # noqa: SIM115  # unbuffered: the next frame is for who reads next
    length, data = int(file.readline() or 0), b""
    while len(data) < length:
        more = file.read(length - len(data))
        if not more:
            sys.exit(75)
        data += more
    return data


if __name__ == "__main__":
    main(read_frame, os.environ)
