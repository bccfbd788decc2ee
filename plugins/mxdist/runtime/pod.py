"""The first thing that runs in the launcher pod of an MPIJob: it waits for the workers and becomes the supervisor.

This file is self-contained: it is sent as text, in the pod's environment (``MXDIST_POD``), as are ``bootstrap.py``
(``MXDIST_BOOTSTRAP``) and the document for it (``MXDIST_DOCUMENT``). What only the pod knows is added to that here:

* the names of the workers, which the operator writes to ``/etc/mpi/hostfile``;
* the keys for S3 and MLflow, which come from a Secret as variables;
* the job's own key pair, which the operator mounts: the private key logs in at the workers, and the public one is the
  host key of every worker's sshd, so nobody else can pass for one.

The operator starts the launcher when the workers are ready; but when the job was suspended, it starts all at once.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
import time
import types
import zlib
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

HOSTFILE = "/etc/mpi/hostfile"
WAIT_S = 1800.0
"""Workers that pull their image may take so long."""

_ASK_S = 5.0
_PAUSE_S = 1.0
_SAY_S = 30.0


def main(environment: MutableMapping[str, str]) -> None:
    """Wait for the workers, and become the supervisor. Does not return."""
    signal.signal(signal.SIGTERM, _end)  # the first process of a pod would not hear it otherwise
    document: dict[str, Any] = json.loads(environment.pop("MXDIST_DOCUMENT"))
    pod: dict[str, Any] = document.pop("pod")
    hosts = workers(Path(pod.get("hostfile", HOSTFILE)).read_text())[: pod["workers"]]
    secrets = {name: environment.pop(name) for name in pod["secret_names"] if environment.get(name)}
    pair = Path(pod["pair"])
    document["hosts"] = hosts
    document["secrets"] = {
        **secrets,
        "MXDIST_SSH_KEY": (pair / "id_rsa").read_text(),
        "MXDIST_SSH_KNOWN_HOSTS": known_hosts((pair / "id_rsa.pub").read_text()),
    }
    left = wait_for(hosts, pod["port"], time.monotonic() + pod.get("wait_s", WAIT_S))
    if left:
        sys.exit(f"these workers do not answer: {', '.join(left)}")
    bootstrap = types.ModuleType("mxdist_bootstrap")
    exec(compile(unpacked(environment.pop("MXDIST_BOOTSTRAP")), "mxdist-bootstrap", "exec"), bootstrap.__dict__)  # noqa: S102
    bootstrap.begin(document)


def workers(hostfile: str) -> list[str]:
    """Return the names in a hostfile: ``name slots=2``, as for Open MPI."""
    return [line.split()[0] for line in hostfile.splitlines() if line.split()]


def known_hosts(public_key: str) -> str:
    """Return a line of a known_hosts file: every host has this key."""
    return " ".join(["*", *public_key.split()[:2]])


def wait_for(hosts: Iterable[str], port: int, end: float) -> list[str]:
    """Wait until every host takes connections; return those that did not until ``end`` (monotonic seconds)."""
    left, said_at = list(hosts), time.monotonic()
    while True:
        left = [host for host in left if not _answers(host, port)]
        if not left or time.monotonic() > end:
            return left
        if time.monotonic() - said_at > _SAY_S:
            said_at = time.monotonic()
            print(
                f"waiting for {len(left)} workers: {', '.join(left[:4])}{' ...' if len(left) > 4 else ''}", flush=True
            )
        time.sleep(_PAUSE_S)


def unpacked(text: str) -> bytes:
    """Return what ``launch.kubernetes_pod.packed`` made small."""
    return zlib.decompress(base64.b64decode(text))


def _answers(host: str, port: int) -> bool:
    """Whether a host's name is known yet, and its sshd listens."""
    try:
        with socket.create_connection((host, port), timeout=_ASK_S):
            return True
    except OSError:
        return False


def _end(_number: int, _frame: object) -> None:
    sys.exit(143)


if __name__ == "__main__":
    main(os.environ)
