"""``mxdist preflight``: look at the place where a job would run, before it does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from mxdist.environment import SECRET_NAMES, travelling
from mxdist.errors import LaunchError
from mxdist.launch.findings import CLUSTER, SUBMITTER, Finding, Preflight
from mxdist.launch.hosts import HostPlan, place
from mxdist.launch.patience import bounded
from mxdist.launch.preflight import Report, Wanted, judge, matrix, request_of
from mxdist.launch.probing import FIRST_S, Canary, canary, look
from mxdist.spec import Dataset, EvaluationJob, TrainingJob
from mxdist.spec.cluster import ClusterKind
from mxdist.spec.job import BaseJob
from mxdist.store import Credentials, Store

if TYPE_CHECKING:
    from mxdist.launch.platforms import Platforms
    from mxdist.runtime.channel import Opener

PREFLIGHT_KEY = "preflight"
"""The job key in a manifest that is only looked at."""

_SRUN_HINT = (
    "(The nodes must be free for a moment, and must be able to connect to where srun runs: see SrunPortRange in "
    "slurm.conf, or name a head node.)"
)
_CONNECT_S, _ATTEMPTS = 6.0, 2
"""Over ssh: a host that drops the first attempt gets another one, within the time of a report."""


def check(
    job: BaseJob,
    runs: Store,
    platforms: Platforms,
    *,
    secrets: Mapping[str, str],
    dataset: Dataset | None = None,
    deep: bool = False,
) -> Preflight:
    """Return what is right and wrong with the hosts of ``job``: all of it, within 20 s (``deep``: two minutes).

    :param secrets: values for names of ``SECRET_NAMES``, as a submission gives them.
    :param dataset: what will be trained on; default: the job's own.
    :param deep: also import MXNet on every host and compute something on every device.
    :raises SpecError: the job does not fit on its hosts.
    """
    if dataset is None and isinstance(job, (TrainingJob, EvaluationJob)):
        dataset = job.dataset
    hosts = place(job)
    with canary(runs) as written:
        return _Check(job, runs, platforms, hosts, written, dataset, secrets, deep).run()


@dataclass(frozen=True)
class _Check:
    job: BaseJob
    runs: Store
    platforms: Platforms
    hosts: tuple[HostPlan, ...]
    written: Canary
    dataset: Dataset | None
    secrets: Mapping[str, str]
    deep: bool

    def run(self) -> Preflight:
        """Look everywhere."""
        own = self._of_submitter()
        if self.job.cluster.kind is ClusterKind.KUBERNETES:
            return Preflight(self._head(), (own, *self._of_kubernetes()))
        python = self.job.cluster.python or self.platforms.python or os.environ.get("MXDIST_NODE_PYTHON")
        if not python:
            problem = "no Python of the node environment is known; set cluster.python, or MXDIST_NODE_PYTHON"
            return Preflight(self._head(), (own, Finding(SUBMITTER, "python", "no", problem)))
        hosts, reports, found = self._reports(python)
        wanted = Wanted.of(self.job, hosts, runs_uri=self.runs.uri, data_bytes=self._data_bytes())
        return Preflight(self._head(), (own, *found, *judge(wanted, reports)), matrix(wanted, reports))

    def _reports(self, python: str) -> tuple[tuple[HostPlan, ...], dict[str, Report], list[Finding]]:
        """Return the hosts, what they say, and what is to be said of the cluster as a whole."""
        request = self._request()
        if self.job.cluster.kind is ClusterKind.SLURM:
            return self._of_slurm(python, request)
        first = {"mlflow": request.pop("mlflow")} if "mlflow" in request else {}
        with self._opener() as opener:
            return self.hosts, look(self.hosts, opener, python, request, first=first), []

    def _of_slurm(
        self, python: str, request: Mapping[str, Any]
    ) -> tuple[tuple[HostPlan, ...], dict[str, Report], list[Finding]]:
        from mxdist.launch.check_slurm import srun
        from mxdist.launch.probing_together import look_together

        try:
            with srun(self.job, self.hosts, python, self.platforms.slurm_head(self.job.cluster)) as channel:
                reports = look_together(channel, len(self.hosts), request)
        except LaunchError as error:
            hint = "" if error.hint else f" {_SRUN_HINT}"
            return (), {}, [Finding(CLUSTER, "allocation", "no", f"{error}{hint}")]
        silent = len(self.hosts) - len(reports)
        problem = f"{silent} of {len(self.hosts)} nodes have not answered in {FIRST_S:g} s" if silent else ""
        told = Finding(CLUSTER, "allocation", f"{len(reports)} of {len(self.hosts)}", problem)
        return place(self.job, sorted(reports))[: len(reports)], reports, [told]

    def _of_kubernetes(self) -> list[Finding]:
        from mxdist.launch.kubernetes import KubernetesLauncher

        launcher = self.platforms.of(self.job.cluster)
        assert isinstance(launcher, KubernetesLauncher)  # noqa: S101  # for the type checker
        named = cast("TrainingJob", self.job)  # of a job, a manifest shows only what all have
        return launcher.findings(named, PREFLIGHT_KEY, runs_uri=self.runs.uri, has_keys=bool(self.secrets))

    def _head(self) -> str:
        count = len(self.hosts)
        return f"preflight of {self.job.name}: {count} {self.job.cluster.kind} host{'s' if count != 1 else ''}"

    def _of_submitter(self) -> Finding:
        if self.written.error:
            problem = f"the run store cannot be written and read: {self.written.error}"
            return Finding(SUBMITTER, "store", "no", problem)
        return Finding(SUBMITTER, "store", f"{self.written.took_s * 1000:.0f} ms")

    def _request(self) -> dict[str, Any]:
        request = request_of(
            self.job,
            runs_uri=self.runs.uri,
            hosts=[host.name for host in self.hosts],
            nonce=self.written.nonce,
            token=self.written.token,
            reads=[] if self.dataset is None else [self.dataset.manifest_uri],
            secrets={name: value for name, value in self.secrets.items() if name in SECRET_NAMES and value},
        )
        request["workdir"] = self.job.cluster.workdir or self.platforms.workdir_of(self.job)
        return {**request, "environment": travelling(os.environ), "deep": self.deep}

    def _data_bytes(self) -> int:
        """Return the size of the dataset; 0 if that is not known here: that it cannot be read is told host by host."""
        if self.dataset is None or self.written.error:
            return 0
        from mxdist.data.manifest import load_manifest

        dataset, storage, keys = self.dataset, self.job.storage, Credentials.from_environment(self.secrets)
        known = keys if keys.access_key else None

        def size() -> int:
            found = load_manifest(dataset.manifest_uri, dataset.version, storage=storage, credentials=known)
            return found[1].size_bytes

        return bounded(size, lambda _: 0)

    @contextmanager
    def _opener(self) -> Iterator[Opener]:
        if self.job.cluster.kind is ClusterKind.LOCAL:
            from mxdist.runtime.channel import CommandOpener

            yield CommandOpener(("env",))  # says in its own words what cannot be run
            return
        from mxdist.runtime.ssh_channel import SshOpener

        access = replace(
            self.platforms.ssh_access(self.job.cluster), connect_timeout_s=_CONNECT_S, connect_attempts=_ATTEMPTS
        )
        opener = SshOpener(access)
        try:
            yield opener
        finally:
            threading.Thread(target=opener.close, daemon=True).start()
