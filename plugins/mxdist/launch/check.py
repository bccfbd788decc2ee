"""``mxdist preflight``: look at the place where a job would run, before it does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mxdist.environment import SECRET_NAMES, travelling
from mxdist.launch.findings import SUBMITTER, Finding, Preflight
from mxdist.launch.hosts import HostPlan, place
from mxdist.launch.patience import bounded
from mxdist.launch.preflight import Wanted, judge, matrix, request_of
from mxdist.launch.probing import Canary, canary, look
from mxdist.spec import Dataset, EvaluationJob, TrainingJob
from mxdist.spec.cluster import ClusterKind
from mxdist.spec.job import BaseJob
from mxdist.store import Credentials, Store

if TYPE_CHECKING:
    from mxdist.launch.platforms import Platforms
    from mxdist.runtime.channel import Opener

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
        own = [self._of_submitter()]
        python = self.job.cluster.python or self.platforms.python or os.environ.get("MXDIST_NODE_PYTHON")
        if not python:
            problem = "no Python of the node environment is known; set cluster.python, or MXDIST_NODE_PYTHON"
            return Preflight(self._head(), (*own, Finding(SUBMITTER, "python", "no", problem)))
        wanted = Wanted.of(self.job, self.hosts, runs_uri=self.runs.uri, data_bytes=self._data_bytes())
        request = self._request()
        first = {"mlflow": request.pop("mlflow")} if "mlflow" in request else {}
        with self._opener() as opener:
            reports = look(self.hosts, opener, python, request, first=first)
        return Preflight(self._head(), (*own, *judge(wanted, reports)), matrix(wanted, reports))

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
