"""Jobs on several hosts that are all this machine: each has an agent, a work folder and a loopback address of its own.

What a host is called is its address. Agents are started by a plain command, as ``srun`` would start them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from world.conftest import Jobs

from mxdist import processes
from mxdist.launch import Bundle, JobClient, LocalLauncher
from mxdist.launch.delivery import publish
from mxdist.spec import TrainingJob
from mxdist.store import Attempt, Store

FIRST, SECOND, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
CLUSTER: dict[str, Any] = {"kind": "ssh", "hosts": [f"{FIRST}:1", f"{SECOND}:1"], "interface": "lo"}


class HostsLauncher(LocalLauncher):
    """Starts the supervisor here, and tells it of other hosts.

    :param disks: the folder of the hosts' own work folders.
    :param runs: the run store.
    :param here: which of the hosts the supervisor's own is; None: none of them.
    """

    def __init__(self, disks: Path, runs: Store, *, python: str, workdir: Path, here: str | None = FIRST) -> None:
        super().__init__(python=python, workdir=workdir)
        self.disks, self.runs, self.here = disks, runs, here
        self.more_secrets: dict[str, str] = {}
        self.prefix = ["env", f"MXDIST_WORKDIR={disks}/disk-{{host}}"]

    def _prepare(self, attempt: Attempt, bundle: Bundle, secrets: Mapping[str, str]) -> tuple[Path, Path]:
        folder, path = super()._prepare(attempt, bundle, secrets)
        told = json.loads((folder / "attempt.json").read_text())
        code = publish(bundle, self.runs)
        told |= {"code": code, "here": self.here, "opener": {"how": "command", "prefix": self.prefix}}
        (folder / "attempt.json").write_text(json.dumps(told))
        path.write_text(json.dumps({**json.loads(path.read_text()), **self.more_secrets}))
        return folder, path


def on_hosts(jobs: Jobs, *, here: str | None = FIRST) -> HostsLauncher:
    """Let the jobs of a test run on hosts; return their launcher."""
    launcher = HostsLauncher(
        jobs.folder, jobs.client.runs, python=str(jobs.launcher._python), workdir=jobs.folder / "jobs", here=here
    )
    jobs.client = JobClient(jobs.client.runs, launcher)
    return launcher


def across(job: TrainingJob, **changes: Any) -> TrainingJob:
    """Return ``job`` for the hosts."""
    found = TrainingJob.parse({**job.to_document(), "cluster": CLUSTER, **changes})
    assert isinstance(found, TrainingJob)
    return found


def agent(attempt: Attempt, number: int = 1) -> int:
    """Return the process id of the agent of a host; 0 while there is none."""
    return next((pid for pid in carrying(attempt, number) if "agent" in _command(pid)), 0)


def carrying(attempt: Attempt, number: int = 1) -> list[int]:
    """Return the process ids of what the agent of a host and its ranks are."""
    return [process.pid for process in processes.find(f"{attempt.claim.token}.{number}", exact=True)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def disk(jobs: Jobs, host: str = SECOND) -> Path:
    """Return the work folder of a host."""
    return jobs.folder / f"disk-{host}"


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment of a process."""
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


__all__ = [
    "CLUSTER", "FIRST", "SECOND", "THIRD", "HostsLauncher", "across", "agent", "carrying", "disk", "environment_of",
    "on_hosts",
]  # fmt: skip
