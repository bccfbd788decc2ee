"""Jobs as Kubeflow MPIJobs: the launcher pod runs the supervisor, the worker pods run the ranks.

A start is one MPIJob whose name says which start it is, so that the API server itself decides who was first. It may
wait in a queue for hours; it then counts as alive. All else is read from the run store, as on every platform: nothing
of a job's progress is asked of the cluster, and a pod needs no right there.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import yaml

from mxdist.errors import LaunchError, Problem, SpecError
from mxdist.launch.base import Launcher, Life, Sent
from mxdist.launch.bundle import Bundle
from mxdist.launch.delivery import publish
from mxdist.launch.findings import Finding
from mxdist.launch.hosts import place
from mxdist.launch.kubernetes_api import Exists, KubernetesApi, connect
from mxdist.launch.kubernetes_check import CLUSTER, findings
from mxdist.launch.kubernetes_pod import NODE_PYTHON, document_for, start_for
from mxdist.launch.kubernetes_seen import Standing, number_of, standing, trouble
from mxdist.launch.kubernetes_watch import JobWatch
from mxdist.launch.mpijob import GROUP, NONCE_NOTE, TOKEN_LABEL, VERSION, WORKDIR, build, job_name, token_label
from mxdist.launch.mpijob_schema import check
from mxdist.launch.plan import SECRET_NAMES, Plan, build_plan, user_file
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.cluster import Code
from mxdist.store import Attempt

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_KILL_S = 60.0  # beyond the grace: for the kubelets to say that a pod is gone
_PAUSE_S = 0.3
_FRESH_S = 60.0


class KubernetesLauncher(Launcher):
    """Jobs on a cluster with Kubeflow's mpi-operator.

    :param client: a configured client, or what makes one when it is first needed; default: see ``kubeconfig``.
    :param kubeconfig: a kubeconfig file; default: the pod's own service account, else the user's kubeconfig.
    :param context: which of its contexts.
    """

    def __init__(
        self,
        client: ApiClient | Callable[[], ApiClient] | None = None,
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
    ) -> None:
        self._client, self._kubeconfig, self._context = client, kubeconfig, context

    @cached_property
    def api(self) -> KubernetesApi:
        """The cluster.

        :raises LaunchError: none is known, or the client is not installed.
        """
        try:
            client = self._client() if callable(self._client) else self._client
            return KubernetesApi(client or connect(self._kubeconfig, context=self._context))
        except ImportError:
            raise LaunchError(
                "Python's client for Kubernetes is not installed here.",
                hint="pip install mxdist[kubernetes]",
                retryable=False,
            ) from None

    def plan(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> Plan:
        """See ``Launcher``.

        :raises SpecError: the manifest would be refused, or nobody could read the run store or the code.
        """
        _check_reach(job, runs_uri)
        check(_planned(job, job_key, runs_uri, attempt=1))
        return build_plan(
            job,
            job_key,
            runs_uri=runs_uri,
            python=job.cluster.python or NODE_PYTHON,
            workdir=job.cluster.workdir or WORKDIR,
            cores=(),
        )

    def sends(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> tuple[Sent, ...]:
        """See ``Launcher``.

        :raises SpecError: the manifest would be refused.
        """
        check(_planned(job, job_key, runs_uri, attempt=1))
        manifest = _planned(job, job_key, runs_uri, attempt="<attempt>")
        text = yaml.safe_dump(manifest, sort_keys=False, width=1000)
        return (Sent(f"MPIJob to namespace {job.cluster.kubernetes.namespace}", text),)

    def check(self, job: TrainingJob | EvaluationJob) -> None:
        """Let the cluster go through the making of the MPIJob without keeping it, before anything is claimed.

        :raises LaunchError: it would be refused: no rights, no MPIJobs, a policy, a quota of objects.
        """
        with suppress(Exists):
            self.api.create_job(_planned(job, job.name, "s3://runs", attempt=1), dry_run=True)

    def findings(
        self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str, has_keys: bool = False
    ) -> list[Finding]:
        """Return what a preflight finds in the cluster; nothing is created.

        :param has_keys: keys for S3 or MLflow are to travel with the job.
        :raises SpecError: the manifest would be refused.
        """
        manifest = _planned(job, job_key, runs_uri, attempt=1)
        check(manifest)
        try:
            return list(findings(self.api, manifest, makes_secret=has_keys and not job.cluster.kubernetes.secret))
        except LaunchError as error:
            return [Finding(CLUSTER, "server", "no", str(error))]

    def start(self, attempt: Attempt, bundle: Bundle, *, incarnation: int, secrets: Mapping[str, str]) -> bool:
        """See ``Launcher``. It returns once the cluster has the MPIJob, whether or not there is room for it yet.

        :raises SpecError: the manifest would be refused.
        """
        if attempt.supervisors.last() >= incarnation:
            return False
        job, nonce = attempt.claim.parsed(), uuid.uuid4().hex
        keys = {name: value for name, value in secrets.items() if name in SECRET_NAMES and value}
        name = job_name(attempt.claim.job_key, attempt.number, incarnation, workers=len(place(job)))
        # The Secret's name cannot be foreseen, so nobody can have put another one in its place.
        own = f"{name}-{nonce[:10]}" if keys and not job.cluster.kubernetes.secret else None
        manifest = self._manifest(attempt, bundle, incarnation, nonce, own or job.cluster.kubernetes.secret)
        made, ours = self._create(attempt, manifest, nonce)
        if own is not None:
            try:
                self._ensure_secret(attempt, made, keys)
            except LaunchError:
                if ours:  # it would wait for its Secret, and whoever tries again would find it alive
                    with suppress(LaunchError):
                        self.api.delete_job(made["metadata"]["namespace"], name)
                raise
        return ours

    def life(self, attempt: Attempt) -> Life:
        try:
            jobs = self._jobs(attempt)
        except LaunchError as error:
            if error.retryable and time.time() - attempt.read_state().heartbeat < _FRESH_S:
                return Life.ALIVE  # the cluster cannot be asked, but the supervisor writes
            raise
        if not jobs:
            return Life.DEAD if attempt.supervisors.last() else Life.NEVER
        newest = max(jobs, key=number_of)
        return Life.DEAD if standing(newest).ended or self._hopeless(attempt, newest) else Life.ALIVE

    def kill(self, attempt: Attempt, *, grace_s: float) -> None:
        namespace, selector = _place_of(attempt)
        end = time.monotonic() + grace_s + _KILL_S
        asked: set[str] = set()
        while True:
            left = [f"MPIJob {one['metadata']['name']}" for one in self._delete_jobs(attempt, asked)]
            left += [_described(one) for one in self._delete_pods(namespace, selector, grace_s, asked)]
            if not left:
                return
            if time.monotonic() > end:
                raise LaunchError(
                    f"attempt {attempt.number} of {attempt.claim.job_key} is deleted in namespace {namespace}, but "
                    f"after {grace_s + _KILL_S:.0f} s these are still there: {', '.join(left)}.",
                    hint="A node that does not answer keeps its pods: see kubectl describe, or delete the node.",
                )
            time.sleep(_PAUSE_S)

    def forget(self, attempt: Attempt) -> None:
        """Let the cluster delete the MPIJobs of an attempt that is over, with their Secrets; nobody waits for it.

        :raises LaunchError: it cannot be asked.
        """
        self._delete_jobs(attempt, set())

    def watch(self, attempt: Attempt, *, timeout_s: float) -> Iterator[Standing]:
        """Yield where the newest MPIJob of ``attempt`` stands, at first and when that changes, until it has ended.

        :raises LaunchError: the cluster cannot be asked.
        """
        namespace, selector = _place_of(attempt)
        said = None
        for jobs in JobWatch(self.api, namespace, selector).snapshots(timeout_s):
            newest = max(jobs.values(), key=number_of, default=None)
            seen = standing(newest) if newest is not None else Standing("deleted")
            if seen != said:
                yield seen
            if seen.ended:
                return
            said = seen

    def _manifest(
        self, attempt: Attempt, bundle: Bundle, incarnation: int, nonce: str, secret: str | None
    ) -> dict[str, Any]:
        claim, job = attempt.claim, attempt.claim.parsed()
        document = document_for(
            job,
            runs_uri=attempt.job.runs.uri,
            job_key=claim.job_key,
            attempt=attempt.number,
            incarnation=incarnation,
            token=claim.token,
            nonce=nonce,
            code=code_of(job, lambda: publish(bundle, attempt.job.runs)),
        )
        manifest = build(job, place(job), start_for(job, document), secret=secret)
        check(manifest)
        return manifest

    def _create(self, attempt: Attempt, manifest: dict[str, Any], nonce: str) -> tuple[dict[str, Any], bool]:
        """Return the MPIJob of a start, and whether this call made it."""
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        try:
            return self.api.create_job(manifest), True
        except Exists:
            found = self.api.job(namespace, name)
        except LaunchError as error:
            return self._made_in_spite_of(error, namespace, name, nonce), True
        if found["metadata"].get("labels", {}).get(TOKEN_LABEL) != token_label(attempt.claim.token):
            raise LaunchError(
                f"there is an MPIJob {name} in namespace {namespace} that belongs to another attempt.",
                hint="Two run stores share the namespace: delete it, or give the job another name or namespace.",
                retryable=False,
            )
        why = self._hopeless(attempt, found)
        if why:
            self._give_up(attempt, found, why)
        # Also when the answer to our own request was lost on its way, and the client asked again.
        return found, _nonce_of(found) == nonce

    def _made_in_spite_of(self, error: LaunchError, namespace: str, name: str, nonce: str) -> dict[str, Any]:
        """Return the MPIJob that this call made although the server's answer was ``error``, such as a lost one.

        :raises LaunchError: ``error``: it did not, or nobody can tell.
        """
        if error.retryable:
            with suppress(LaunchError):
                found = self.api.job(namespace, name)
                if _nonce_of(found) == nonce:
                    return found
        raise error

    def _give_up(self, attempt: Attempt, job: Mapping[str, Any], why: str) -> None:
        """Count a start that came to nothing, so that the next one is another, and say why."""
        number, metadata = number_of(job), job["metadata"]
        attempt.supervisors.append(
            number, {"pid": 0, "host": "", "host_identity": "", "start_time": 0, "at": time.time()}
        )
        self.api.delete_job(metadata["namespace"], metadata["name"])
        raise LaunchError(
            f"MPIJob {metadata['name']} in namespace {metadata['namespace']} came to nothing: {why}.",
            hint="It is deleted; the next start makes another one.",
        )

    def _hopeless(self, attempt: Attempt, job: Mapping[str, Any]) -> str:
        """Return why the supervisor of an MPIJob will never be heard of; "" if it was, or may still be."""
        if attempt.supervisors.last() >= number_of(job):
            return ""
        namespace, selector = _place_of(attempt)
        return trouble(job, self.api.pods(namespace, selector), now=time.time())

    def _ensure_secret(self, attempt: Attempt, job: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        """Make the Secret that the MPIJob names, unless it is there. It belongs to it, and vanishes with it."""
        metadata = job["metadata"]
        container = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
        for source in container.get("envFrom", []):
            owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "MPIJob", "name": metadata["name"]}
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {
                    "name": source["secretRef"]["name"],
                    "labels": {TOKEN_LABEL: token_label(attempt.claim.token)},
                    "ownerReferences": [{**owner, "uid": metadata["uid"], "controller": False}],
                },
                "immutable": True,
                "stringData": dict(keys),
            }
            with suppress(Exists):
                self.api.create_secret(metadata["namespace"], secret)

    def _jobs(self, attempt: Attempt) -> list[dict[str, Any]]:
        return self.api.jobs(*_place_of(attempt))[0]

    def _delete_jobs(self, attempt: Attempt, asked: set[str]) -> list[dict[str, Any]]:
        found = self._jobs(attempt)
        for one in found:
            if one["metadata"]["uid"] not in asked:
                self.api.delete_job(one["metadata"]["namespace"], one["metadata"]["name"])
                asked.add(one["metadata"]["uid"])
        return found

    def _delete_pods(self, namespace: str, selector: str, grace_s: float, asked: set[str]) -> list[dict[str, Any]]:
        """Delete pods with the grace that is left to them; never none at all: that would not wait for the kubelet."""
        found = self.api.pods(namespace, selector)
        for one in found:
            if one["metadata"]["uid"] not in asked:
                self.api.delete_pod(namespace, one["metadata"]["name"], grace_s=max(1, math.ceil(grace_s)))
                asked.add(one["metadata"]["uid"])
        return found


def code_of(job: TrainingJob | EvaluationJob, published: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return how the code gets into the pods: an image has mxdist, but not the user's own file."""
    if job.cluster.code is Code.IMAGE and user_file(job)[1] is None:
        return {"how": "image"}
    return published()


def _planned(job: TrainingJob | EvaluationJob, job_key: str, runs_uri: str, *, attempt: int | str) -> dict[str, Any]:
    """Return the MPIJob as it is known before the job is submitted."""
    bundle = {"how": "bundle", "uri": f"{runs_uri}/_code/<digest>.zip", "digest": "<digest>"}
    document = document_for(
        job,
        runs_uri=runs_uri,
        job_key=job_key,
        attempt=attempt,
        incarnation=1,
        token="<token>",  # noqa: S106  # a word for it
        nonce="<nonce>",
        code=code_of(job, lambda: bundle),
    )
    start = start_for(job, document)
    shown = replace(start, texts={name: f"<{name.lower()}>" for name in start.texts})
    return build(job, place(job), shown, secret=job.cluster.kubernetes.secret)


def _check_reach(job: TrainingJob | EvaluationJob, runs_uri: str) -> None:
    problems = []
    if not runs_uri.startswith("s3://"):
        problems.append(Problem("", f"the run store {runs_uri} is a folder, which no pod sees: it must be s3://"))
    if job.cluster.code is Code.SHARED:
        problems.append(Problem("cluster.code", "pods share no disk with the host that submits: use bundle or image"))
    if problems:
        raise SpecError("The job", problems)


def _nonce_of(job: Mapping[str, Any]) -> str | None:
    nonce: str | None = job["metadata"].get("annotations", {}).get(NONCE_NOTE)
    return nonce


def _described(pod: Mapping[str, Any]) -> str:
    node = pod["spec"].get("nodeName")
    return f"pod {pod['metadata']['name']}" + (f" on node {node}" if node else "")


def _place_of(attempt: Attempt) -> tuple[str, str]:
    """Return the namespace of an attempt, and the labels of what belongs to it."""
    namespace = attempt.claim.parsed().cluster.kubernetes.namespace
    return namespace, f"{TOKEN_LABEL}={token_label(attempt.claim.token)}"
