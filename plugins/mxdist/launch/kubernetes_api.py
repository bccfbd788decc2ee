"""What is asked of a Kubernetes API server, through the official client, and what its refusals mean for people.

The client is loaded by the first who needs it: that takes seconds, and jobs of other platforms do without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mxdist.errors import LaunchError
from mxdist.launch.mpijob import GROUP, PLURAL, VERSION

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, ApiException

CONNECT_S = 5.0
ANSWER_S = 30.0


class Missing(LaunchError):
    """There is no such object."""

    retryable = False


class Exists(LaunchError):
    """There is an object of that name already."""


class Gone(LaunchError):
    """The server has forgotten what happened since; whoever watches has to list again."""


def connect(kubeconfig: str | None = None, *, context: str | None = None) -> ApiClient:
    """Return a client of a cluster.

    :param kubeconfig: a file; default: the pod's own service account inside of a cluster, else the user's kubeconfig.
    :param context: which of the file's contexts; default: the one that it calls the current one.
    :raises LaunchError: there is no such file, or it is not usable.
    """
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    try:
        if kubeconfig is None and context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
            settings = client.Configuration()
            config.load_incluster_config(client_configuration=settings)
            return client.ApiClient(settings)
        return config.new_client_from_config(config_file=kubeconfig, context=context)
    except (ConfigException, OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"no Kubernetes cluster is known: {error}",
            hint="Set a Kubernetes connection, $KUBECONFIG, or run inside of a cluster.",
            retryable=False,
        ) from None


class KubernetesApi:
    """One cluster. Objects are plain JSON values.

    :param client: configured; its credentials decide what may be done.
    """

    def __init__(self, client: ApiClient) -> None:
        from kubernetes.client import AuthorizationV1Api, CoreV1Api, CustomObjectsApi, VersionApi

        self._core, self._custom = CoreV1Api(client), CustomObjectsApi(client)
        self._authorization, self._version = AuthorizationV1Api(client), VersionApi(client)

    def version(self) -> str:
        """Return the server's version.

        :raises LaunchError: it does not answer, or not to us.
        """
        with guard("ask for the server's version"):
            return str(_json(self._version.get_code)["gitVersion"])

    def serves_jobs(self) -> bool:
        """Return whether the cluster knows MPIJobs of the version that mxdist writes."""
        try:
            with guard("ask for the kinds of objects"):
                found = _json(self._custom.get_api_resources, GROUP, VERSION)
        except Missing:
            return False
        return any(one["name"] == PLURAL for one in found.get("resources", []))

    def may(self, namespace: str, verb: str, resource: str, *, group: str = "", subresource: str = "") -> bool:
        """Return whether we may do something; anybody may ask this."""
        asked = {"namespace": namespace, "verb": verb, "group": group, "resource": resource, "subresource": subresource}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        with guard("ask for our rights"):
            answer = _json(self._authorization.create_self_subject_access_review, body)
        return bool(answer["status"]["allowed"])

    def create_job(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create an MPIJob and return it as the server holds it.

        :raises Exists: there is one of that name.
        :raises LaunchError: it was refused.
        """
        namespace, more = manifest["metadata"]["namespace"], {"dry_run": "All"} if dry_run else {}
        with guard(f"create MPIJob {manifest['metadata']['name']} in namespace {namespace}"):
            create = self._custom.create_namespaced_custom_object
            # Servers from 1.25 on refuse what they would drop; older ones do not look at this.
            return _json(create, GROUP, VERSION, namespace, PLURAL, manifest, field_validation="Strict", **more)

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        """Return an MPIJob.

        :raises Missing: there is none.
        """
        with guard(f"read MPIJob {name} in namespace {namespace}"):
            return _json(self._custom.get_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL, name)

    def jobs(self, namespace: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Return the MPIJobs with these labels, and the version from which on to watch them."""
        with guard(f"list MPIJobs in namespace {namespace}"):
            call = self._custom.list_namespaced_custom_object
            found = _json(call, GROUP, VERSION, namespace, PLURAL, label_selector=selector)
        return found["items"], found["metadata"]["resourceVersion"]

    def delete_job(self, namespace: str, name: str) -> None:
        """Delete an MPIJob; it stays until all that belongs to it is deleted. One that is not there is no error."""
        body = {"propagationPolicy": "Foreground"}
        with guard(f"delete MPIJob {name} in namespace {namespace}", absent_is_fine=True):
            call = self._custom.delete_namespaced_custom_object
            _json(call, GROUP, VERSION, namespace, PLURAL, name, body=body)

    def watch_jobs(self, namespace: str, selector: str, version: str, seconds: int) -> Iterator[dict[str, Any]]:
        """Yield events of MPIJobs, as the server sends them, until ``seconds`` are over or it closes the connection.

        :raises Gone: ``version`` is too old.
        """
        from kubernetes.watch.watch import iter_resp_lines

        with guard(f"watch MPIJobs in namespace {namespace}"):
            answer = self._custom.list_namespaced_custom_object(
                GROUP,
                VERSION,
                namespace,
                PLURAL,
                label_selector=selector,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=seconds,
                watch=True,
                _preload_content=False,
                _request_timeout=(CONNECT_S, seconds + ANSWER_S),
            )
            try:
                for line in iter_resp_lines(answer):
                    event: dict[str, Any] = json.loads(line)
                    if event["type"] == "ERROR":
                        raise refusal("watch MPIJobs", event["object"].get("code", 0), event["object"])
                    yield event
            finally:
                answer.close()
                answer.release_conn()

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        """Return the pods with these labels."""
        with guard(f"list pods in namespace {namespace}"):
            found: list[dict[str, Any]] = _json(self._core.list_namespaced_pod, namespace, label_selector=selector)[
                "items"
            ]
        return found

    def delete_pod(self, namespace: str, name: str, *, grace_s: int) -> None:
        """Delete a pod, or shorten the grace of one that is being deleted. One that is not there is no error."""
        with guard(f"delete pod {name} in namespace {namespace}", absent_is_fine=True):
            _json(self._core.delete_namespaced_pod, name, namespace, grace_period_seconds=grace_s)

    def create_secret(self, namespace: str, secret: Mapping[str, Any]) -> None:
        """Create a Secret.

        :raises Exists: there is one of that name.
        """
        with guard(f"create Secret {secret['metadata']['name']} in namespace {namespace}"):
            _json(self._core.create_namespaced_secret, namespace, secret)

    def quotas(self, namespace: str) -> list[dict[str, Any]]:
        """Return the ResourceQuotas of a namespace."""
        with guard(f"list ResourceQuotas in namespace {namespace}"):
            found: list[dict[str, Any]] = _json(self._core.list_namespaced_resource_quota, namespace)["items"]
        return found


@contextmanager
def guard(doing: str, *, absent_is_fine: bool = False) -> Iterator[None]:
    """Turn what the client raises into errors that say what to do.

    :param doing: what was asked: ``create MPIJob x in namespace y``.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        if absent_is_fine and error.status == 404:
            return
        raise refusal(doing, error.status, _status(error)) from None
    except (HTTPError, OSError) as error:
        raise LaunchError(
            f"cannot {doing}: the API server does not answer: {_root(error)}",
            hint="Check its address, the network and the proxy.",
        ) from None


def refusal(doing: str, code: int, status: Mapping[str, Any]) -> LaunchError:
    """Return what a refusal means.

    :param status: the ``Status`` object of the answer, or only its message.
    """
    said = str(status.get("message") or status.get("reason") or f"HTTP status {code}").strip()
    for matches, kind, hint, retryable in _MEANINGS:
        if matches(code, said):
            return kind(f"cannot {doing}: {said}", hint=hint, retryable=retryable)
    return LaunchError(f"cannot {doing}: {said}", retryable=code in _PASSING or code >= 500)


_PASSING = (0, 408, 409, 429)
"""No answer, too late, at the same time as somebody else, too many: the same may go well a moment later."""

_CRD_HINT = (
    "The cluster does not know MPIJobs of kubeflow.org/v2beta1: let its administrator install Kubeflow's mpi-operator."
)
_RIGHTS_HINT = "Let the administrator grant this right to the account that asks; docs/kubernetes.md lists all of them."
_QUOTA_HINT = "Wait until other jobs have ended, ask for less, or let the administrator raise the namespace's quota."
_MEANINGS: tuple[tuple[Callable[[int, str], bool], type[LaunchError], str, bool], ...] = (
    (lambda code, _: code == 410, Gone, "", True),
    (lambda code, said: code == 404 and "page not found" in said, Missing, _CRD_HINT, False),
    (lambda code, said: code == 404 and said.startswith("namespaces "), Missing, "Create the namespace first.", False),
    (lambda code, _: code == 404, Missing, "", False),
    (lambda code, said: code == 409 and "already exists" in said, Exists, "", True),
    (
        lambda code, said: code == 401 or "system:anonymous" in said,
        LaunchError,
        "Its credentials are wrong or have expired: log in anew.",
        False,
    ),
    (lambda code, said: code == 403 and "exceeded quota" in said, LaunchError, _QUOTA_HINT, True),
    (
        lambda code, said: code == 403 and "failed quota" in said,
        LaunchError,
        "Ask for cpu and memory in the job.",
        False,
    ),
    (lambda code, said: code == 403 and "cannot " in said, LaunchError, _RIGHTS_HINT, False),
    (
        lambda code, said: "admission webhook" in said and "denied" in said,
        LaunchError,
        "A policy of the cluster refuses the job: change what it names, or ask who keeps the policy.",
        False,
    ),
    (
        lambda code, said: "failed calling webhook" in said,
        LaunchError,
        "A service that must admit new objects is down: ask the cluster's administrator.",
        True,
    ),
    (lambda code, _: code == 403, LaunchError, "The cluster's admission control refuses this.", False),
    (
        lambda code, _: code in (400, 422),
        LaunchError,
        "The cluster's MPIJob differs from the one that mxdist writes: compare the versions of mpi-operator.",
        False,
    ),
)


def _status(error: ApiException) -> dict[str, Any]:
    try:
        found = json.loads(error.body)
    except (TypeError, ValueError):
        return {"message": error.body or error.reason}
    return found if isinstance(found, dict) else {"message": str(found)}


def _root(error: BaseException) -> BaseException:
    """Return what a pool's error is about: it says the address and the number of attempts first."""
    reason = getattr(error, "reason", None)
    return reason if isinstance(reason, BaseException) else error


def _json(call: Callable[..., Any], *arguments: Any, **named: Any) -> dict[str, Any]:
    answer = call(*arguments, **named, _preload_content=False, _request_timeout=(CONNECT_S, ANSWER_S))
    found: dict[str, Any] = json.loads(answer.data)
    return found
