"""From the connection that a job names to the platform that it leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mxdist.errors import Problem, SpecError
from mxdist.hooks.ssh import SlurmHook, SshHook
from mxdist.launch.platforms import OwnAccess

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from mxdist.launch.hosts import HostPlan
    from mxdist.spec.cluster import Cluster
    from mxdist.ssh import SshAccess

KINDS = {SshHook.conn_type: "ssh", SlurmHook.conn_type: "slurm", "kubernetes": "kubernetes"}
"""The platform that each type of connection leads to."""


class ConnectionAccess(OwnAccess):
    """The ways to the platforms by Airflow's connections; a job that names none goes by the worker's own files.

    :param find: returns a connection by its id.
    """

    def __init__(self, find: Callable[[str], Connection]) -> None:
        self._find = find

    def ssh(self, cluster: Cluster) -> SshAccess:
        """See ``Access``."""
        found = self._named(cluster)
        return super().ssh(cluster) if found is None else SshHook(found.conn_id, connection=found).access()

    def slurm(self, cluster: Cluster) -> tuple[HostPlan, SshAccess] | None:
        """See ``Access``."""
        found = self._named(cluster)
        if found is None:
            return super().slurm(cluster)
        hook = SlurmHook(found.conn_id, connection=found)
        return None if hook.head is None else (hook.head, hook.access())

    def kubernetes(self, cluster: Cluster) -> Any:
        """See ``Access``."""
        found = self._named(cluster)
        return super().kubernetes(cluster) if found is None else kubernetes_client(found)

    def _named(self, cluster: Cluster) -> Connection | None:
        if cluster.connection is None:
            return None
        found = self._find(cluster.connection)
        kind_of(found, wanted=cluster.kind.value)
        return found


def kind_of(connection: Connection, *, wanted: str | None = None) -> str:
    """Return the platform that a connection leads to.

    :param wanted: the platform that the job names.
    :raises SpecError: none, or another than it should.
    """
    kind = KINDS.get(connection.conn_type or "")
    if kind is None or wanted not in (None, kind):
        types = [name for name, leads in KINDS.items() if wanted in (None, leads)]
        problem = Problem("conn_type", f"is {connection.conn_type!r}; it must be {' or '.join(types)}")
        raise SpecError(f"Connection {connection.conn_id!r}", [problem])
    return kind


def cluster_fields(connection: Connection, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of ``Cluster``: what a task gives, and what the connection says of all else. No secret is in it."""
    kind = kind_of(connection, wanted=given.get("kind") or None)
    if kind == "kubernetes":
        said: dict[str, Any] = {"kind": kind}
        namespace = connection.extra_dejson.get("namespace")
        inner = {"kubernetes": {"namespace": namespace} if namespace else {}}
    else:
        hook = (SshHook if kind == "ssh" else SlurmHook)(connection.conn_id, connection=connection)
        said = hook.cluster_fields()
        inner = {"ssh": said.pop("ssh")} if "ssh" in said else {}
    merged = {name: {**fields, **(given.get(name) or {})} for name, fields in inner.items()}
    return {**said, "connection": connection.conn_id, **_filled(given), **merged}


def check_platform(connection: Connection) -> tuple[bool, str]:
    """Say whether the platform of a connection can be used; what the Test button shows."""
    try:
        kind = kind_of(connection)
    except SpecError as error:
        return False, str(error)
    if kind == "kubernetes":
        return _check_kubernetes(connection)
    return (SshHook if kind == "ssh" else SlurmHook)(connection.conn_id, connection=connection).test_connection()


def kubernetes_client(connection: Connection) -> Any:
    """Return the provider's own client for a connection of its type ``kubernetes``."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

    hook = KubernetesHook(conn_id=connection.conn_id)
    vars(hook)["conn_extras"] = connection.extra_dejson  # a triggerer may not ask Airflow for it once more
    return hook.get_conn()


def _check_kubernetes(connection: Connection) -> tuple[bool, str]:
    """Ask the API server for its version, and whether we may make MPIJobs."""
    from mxdist.launch.kubernetes_api import KubernetesApi

    namespace = connection.extra_dejson.get("namespace") or "default"
    try:
        api = KubernetesApi(kubernetes_client(connection))
        version, known = api.version(), api.serves_jobs()
        allowed = known and api.may(namespace, "create", "mpijobs", group="kubeflow.org")
    except Exception as error:  # of the client too, such as a kubeconfig that is none
        return False, " ".join(str(error).split()) or type(error).__name__
    if not known:
        return False, f"Kubernetes {version} answers, but has no MPIJobs: install Kubeflow's mpi-operator."
    if not allowed:
        return False, f"Kubernetes {version} answers, but we may not create MPIJobs in namespace {namespace}."
    return True, f"Kubernetes {version} answers; MPIJobs can be made in namespace {namespace}."


def _filled(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value not in (None, "")}
