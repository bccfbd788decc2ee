"""Ask the node environment whether a network can be cut as its job wants: only MXNet knows its layers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import mxdist
from mxdist.environment import base_environment
from mxdist.errors import LaunchError, Problem, SpecError
from mxdist.spec import TrainingJob

_TIMEOUT_S = 120


def check_cuts(job: TrainingJob, python: str) -> None:
    """Refuse cuts and stages that a network of mxdist's own does not have; takes some seconds, for those jobs only.

    :param python: of the node environment, on this host.
    :raises SpecError: with every wrong one.
    :raises LaunchError: the node environment gave no answer.
    """
    if not job.parallelism.staged or job.model is None or job.model.name is None:
        return
    environment = base_environment(os.environ) | {
        "PYTHONPATH": str(Path(mxdist.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            [python, "-m", "mxdist.runtime.layout_check"],
            input=json.dumps(job.to_document()),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1])["problems"]
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{python} did not import MXNet within {_TIMEOUT_S} s.") from None
    except (IndexError, ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        hint = "Check the node environment: `mxdist preflight` says more."
        raise LaunchError(f"{python} cannot look at the network: {last}", hint=hint, retryable=False) from None
    if found:
        raise SpecError("The job", [Problem(path, message) for path, message in found])
