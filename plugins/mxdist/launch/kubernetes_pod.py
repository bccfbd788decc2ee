"""What the launcher pod of an MPIJob is given: a constant command, the texts that it runs, and what it is told."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mxdist
from mxdist.environment import SECRET_NAMES, travelling
from mxdist.launch.hosts import place
from mxdist.launch.mpijob import SSH_FOLDER, SSH_PORT, SSH_USER, WORKDIR, Start
from mxdist.spec import EvaluationJob, TrainingJob

NODE_PYTHON = "/opt/node/bin/python"
"""The Python of the images in docker/."""

POD_NAME = "MXDIST_POD"
_FIRST = (
    "import base64,os,zlib;"
    f"exec(compile(zlib.decompress(base64.b64decode(os.environ.pop('{POD_NAME}'))),'mxdist-pod','exec'))"
)


def command(python: str) -> tuple[str, ...]:
    """Return what the launcher pod runs; ``-I``: nothing in its folder or environment counts."""
    return (python, "-I", "-c", _FIRST)


def packed(name: str) -> str:
    """Return the text of a module of ``mxdist.runtime``, small enough for a variable."""
    text = (Path(mxdist.__file__).parent / "runtime" / f"{name}.py").read_bytes()
    return base64.b64encode(zlib.compress(text, 9)).decode()


def document_for(
    job: TrainingJob | EvaluationJob,
    *,
    runs_uri: str,
    job_key: str,
    attempt: int | str,
    incarnation: int,
    token: str,
    nonce: str,
    code: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Return what the supervisor is told: see ``mxdist.runtime.bootstrap``; ``pod`` is for ``mxdist.runtime.pod``."""
    return {
        "what": "supervisor",
        "code": dict(code),
        "python": job.cluster.python or NODE_PYTHON,
        "workdir": job.cluster.workdir or WORKDIR,
        "runs_uri": runs_uri,
        "job_key": job_key,
        "attempt": attempt,
        "token": token,
        "storage": job.storage.to_document(),
        "environment": travelling(environment),
        "incarnation": incarnation,
        "nonce": nonce,
        "foreground": True,
        "here": None,
        "opener": {"how": "ssh", "user": SSH_USER, "port": SSH_PORT},
        "link_timeout_s": job.limits.link_timeout_s,
        "pod": {"workers": len(place(job)), "pair": SSH_FOLDER, "port": SSH_PORT, "secret_names": list(SECRET_NAMES)},
    }


def start_for(job: TrainingJob | EvaluationJob, document: Mapping[str, Any]) -> Start:
    """Return a start, ready for ``mpijob.build``."""
    return Start(
        job_key=document["job_key"],
        attempt=document["attempt"],
        incarnation=document["incarnation"],
        token=document["token"],
        nonce=document["nonce"],
        document=document,
        texts={POD_NAME: packed("pod"), "MXDIST_BOOTSTRAP": packed("bootstrap")},
        command=command(document["python"]),
    )
