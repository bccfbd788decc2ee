"""Which run store, which launcher, which secrets: what the command line takes from its options and environment."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
from pathlib import Path

from mxdist.cli.jobfile import read_job
from mxdist.errors import Problem, SpecError
from mxdist.launch import SECRET_NAMES, JobClient, job_key_for_cli
from mxdist.launch.client import JOB_KEY
from mxdist.launch.platforms import Platforms
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.store import Attempt, open_store


def default_runs() -> str:
    """Return the run store for those who named none."""
    return os.environ.get("MXDIST_RUNS_URI") or f"{_state()}/mxdist/runs"


def default_data() -> str:
    """Return where datasets are staged by those who named no place."""
    return os.environ.get("MXDIST_DATA_URI") or f"{_state()}/mxdist/data"


def absolute(uri: str) -> str:
    """Return a URI as it is, and a folder by its whole path."""
    return uri if "://" in uri else str(Path(uri).expanduser().absolute())


def client(options: argparse.Namespace, job: TrainingJob | EvaluationJob | None = None) -> JobClient:
    """Return the client that the options describe.

    :param job: its storage counts if no option says otherwise.
    """
    uri = absolute(options.runs or default_runs())
    endpoint = options.endpoint_url or (job.storage.endpoint_url if job else None)
    region = job.storage.region if job else None
    return JobClient(open_store(uri, endpoint_url=endpoint, region=region), platforms(options))


def platforms(options: argparse.Namespace) -> Platforms:
    """Return the launcher of all platforms, reached with the user's own keys."""
    return Platforms(workdir=options.workdir)


def job(options: argparse.Namespace) -> TrainingJob | EvaluationJob:
    """Return the job of the file that the options name."""
    found = read_job(Path(options.job), options.set, dataset_from=options.dataset_from)
    if options.endpoint_url and found.storage.endpoint_url is None:
        storage = found.storage.model_copy(update={"endpoint_url": options.endpoint_url})
        found = found.model_copy(update={"storage": storage})
    return found


def client_of_job(options: argparse.Namespace) -> JobClient:
    """Return the client for a job that is named by its key or by its file, whose storage counts then."""
    named = options.job is not None and Path(options.job).is_file()
    return client(options, job(options) if named else None)


def job_key(options: argparse.Namespace, described: TrainingJob | EvaluationJob) -> str:
    """Return the key under which the job is submitted.

    :raises SpecError: the one that was given cannot be a key.
    """
    key = job_key_for_cli(described) if options.key is None else str(options.key)
    if not JOB_KEY.match(key):
        problem = f"{key!r} must be lower case letters, digits and hyphens, at most 80"
        raise SpecError("The job key", [Problem("", problem)])
    return key


def attempt(options: argparse.Namespace, found: JobClient) -> Attempt:
    """Return the attempt that the options name: by a job key, or by a job file."""
    key = str(options.job)
    if Path(key).is_file():
        key = job_key_for_cli(job(options))
    return found.attempt(key, options.attempt)


def secrets() -> dict[str, str]:
    """Return the secrets of this environment that may travel to a job."""
    return {name: os.environ[name] for name in SECRET_NAMES if os.environ.get(name)}


def _state() -> str:
    return os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")


def source() -> dict[str, str]:
    """Return who asks, for the claim."""
    return {"user": getpass.getuser(), "host": socket.gethostname()}
