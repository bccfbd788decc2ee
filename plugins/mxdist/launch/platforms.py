"""Every platform behind one launcher: each job goes where its ``cluster.kind`` says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mxdist.errors import LaunchError
from mxdist.launch.base import Launcher, Life, Sent
from mxdist.launch.bundle import Bundle
from mxdist.launch.local import LocalLauncher, default_workdir
from mxdist.launch.plan import Plan
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.cluster import Cluster, ClusterKind
from mxdist.spec.job import BaseJob
from mxdist.store import Attempt

if TYPE_CHECKING:
    from mxdist.launch.hosts import HostPlan
    from mxdist.ssh import SshAccess


class Access(Protocol):
    """The ways to the platforms, with their credentials: from Airflow's connections, or a user's own files."""

    def ssh(self, cluster: Cluster) -> SshAccess:
        """Return how the hosts of an ssh cluster are entered, unless the job says otherwise."""

    def slurm(self, cluster: Cluster) -> tuple[HostPlan, SshAccess] | None:
        """Return the head node and how it is entered; None: Slurm's commands are on this host."""

    def kubernetes(self, cluster: Cluster) -> Any:
        """Return a ``kubernetes.client.ApiClient``; None: as the user's kubeconfig, or the pod's account, says."""


class OwnAccess:
    """The user's own ways: ssh keys and agent, Slurm's commands or ``MXDIST_SLURM_HEAD``, and the kubeconfig."""

    def ssh(self, cluster: Cluster) -> SshAccess:
        """See ``Access``."""
        from mxdist.ssh import SshAccess

        return SshAccess.from_environment()

    def slurm(self, cluster: Cluster) -> tuple[HostPlan, SshAccess] | None:
        """See ``Access``."""
        name = os.environ.get("MXDIST_SLURM_HEAD")
        if not name:
            return None
        from mxdist.launch.hosts import HostPlan
        from mxdist.spec.hosts import parse_inventory
        from mxdist.ssh import SshAccess

        try:
            (host,) = parse_inventory([name])
        except ValueError as error:
            raise LaunchError(f"MXDIST_SLURM_HEAD must be one host: {error}", retryable=False) from None
        return HostPlan(host.name, 1, host.user, host.port), SshAccess.from_environment()

    def kubernetes(self, cluster: Cluster) -> Any:
        """See ``Access``."""
        return None


class Platforms(Launcher):
    """Each job on the platform that it names; what a platform needs is loaded when a job asks for it.

    :param python: Python of the node environment, unless the job names one.
    :param workdir: the folder of all scratch folders, unless the job names one.
    :param access: the ways to the platforms; default: the user's own.
    """

    def __init__(
        self, *, python: str | None = None, workdir: str | Path | None = None, access: Access | None = None
    ) -> None:
        self._python = python
        self._workdir = workdir
        self._access: Access = access or OwnAccess()

    @property
    def python(self) -> str | None:
        """Python of the node environment for jobs that name none."""
        return self._python

    def workdir_of(self, job: BaseJob) -> str | None:
        """Return the folder of a job's scratch folders; None: what its hosts take by themselves."""
        given = job.cluster.workdir or self._workdir
        if given is None and job.cluster.kind is ClusterKind.LOCAL:
            given = default_workdir()
        return None if given is None else str(given)

    def ssh_access(self, cluster: Cluster) -> SshAccess:
        """Return how the hosts of an ssh cluster are entered."""
        return self._access.ssh(cluster).for_job(cluster.ssh)

    def slurm_head(self, cluster: Cluster) -> tuple[HostPlan, SshAccess] | None:
        """Return the head node of a Slurm cluster and how it is entered; None: Slurm's commands are on this host."""
        return self._access.slurm(cluster)

    def of(self, cluster: Cluster) -> Launcher:
        """Return the launcher of a cluster."""
        if cluster.kind is ClusterKind.SSH:
            from mxdist.launch.ssh import SshLauncher

            return SshLauncher(self._access.ssh(cluster), python=self._python, workdir=self._workdir)
        if cluster.kind is ClusterKind.KUBERNETES:
            from mxdist.launch.kubernetes import KubernetesLauncher

            return KubernetesLauncher(lambda: self._access.kubernetes(cluster))
        if cluster.kind is ClusterKind.SLURM:
            from mxdist.launch.slurm import SlurmLauncher

            return SlurmLauncher(self._access.slurm(cluster), python=self._python, workdir=self._workdir)
        return LocalLauncher(python=self._python, workdir=self._workdir)

    def plan(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> Plan:
        return self.of(job.cluster).plan(job, job_key, runs_uri=runs_uri)

    def sends(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> tuple[Sent, ...]:
        return self.of(job.cluster).sends(job, job_key, runs_uri=runs_uri)

    def check(self, job: TrainingJob | EvaluationJob) -> None:
        self.of(job.cluster).check(job)

    def start(self, attempt: Attempt, bundle: Bundle, *, incarnation: int, secrets: Mapping[str, str]) -> bool:
        return self._of(attempt).start(attempt, bundle, incarnation=incarnation, secrets=secrets)

    def life(self, attempt: Attempt) -> Life:
        return self._of(attempt).life(attempt)

    def kill(self, attempt: Attempt, *, grace_s: float) -> None:
        self._of(attempt).kill(attempt, grace_s=grace_s)

    def forget(self, attempt: Attempt) -> None:
        self._of(attempt).forget(attempt)

    def _of(self, attempt: Attempt) -> Launcher:
        return self.of(attempt.claim.parsed().cluster)
