"""From a job to the MPIJob (kubeflow.org/v2beta1) that runs it. Pure: nothing is read, sent or asked here.

The launcher pod runs the supervisor, in the foreground; the worker pods run an sshd and, below it, one agent each with
its ranks. Nothing is trusted blindly between them: the operator mounts one key pair into all pods of a job, which is
what the launcher logs in with and what every worker's sshd shows as its host key.

No secret stands in a manifest, only the name of the Secret that holds them; it goes to the launcher alone, which hands
on what ranks need. Pods run as an ordinary user, without rights and without a token for the API server, as the
``restricted`` Pod Security Standard asks.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from mxdist.launch.hosts import HostPlan
from mxdist.launch.mpijob_schema import MOST_LETTERS, last_worker
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.platforms import Kubernetes

GROUP, VERSION, PLURAL = "kubeflow.org", "v2beta1", "mpijobs"
TOKEN_LABEL = "mxdist/attempt"  # noqa: S105  # a digest of the token
"""The label of everything that belongs to one attempt."""

INCARNATION_NOTE = "mxdist/incarnation"
NONCE_NOTE = "mxdist/nonce"
"""Tells the launcher that made an MPIJob that it was itself."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
SSH_PORT = 2222
SSH_USER = "mxdist"
SSH_FOLDER = "/etc/mxdist/ssh"
"""Where the operator mounts the job's key pair: ``id_rsa``, ``id_rsa.pub`` and ``authorized_keys``."""

WORKDIR = "/var/lib/mxdist/jobs"
DOCUMENT_NAME = "MXDIST_DOCUMENT"

_DIGEST_LETTERS = 10
_NET_S = 600  # the cluster ends a job so long after everything else should have
_BOOKS_S = 90  # what a supervisor without ranks may take: see launch/client.py
_QUANTITY = re.compile(r"^([0-9.]+)(\D*)$")
_LAUNCHER_REQUESTS = {"cpu": "250m", "memory": "512Mi"}
_LAUNCHER_LIMITS = {"cpu": "2", "memory": "4Gi"}


@dataclass(frozen=True)
class Start:
    """One start of an attempt.

    :param attempt: its number, or a word for one that is not known yet.
    :param token: the attempt's.
    :param nonce: any word that is this call's own.
    :param document: what the supervisor is told: see ``runtime/bootstrap.py``; nothing secret.
    :param texts: variables of the launcher pod: what its command runs.
    :param command: what the launcher pod runs.
    """

    job_key: str
    attempt: int | str
    incarnation: int
    token: str
    nonce: str
    document: Mapping[str, Any]
    texts: Mapping[str, str]
    command: Sequence[str]


def job_name(job_key: str, attempt: int | str, incarnation: int, *, workers: int) -> str:
    """Return what an MPIJob is called: the same for the same start, so that a second one is found out.

    The pod of the last worker must still have a name of 63 letters, so a long job key is cut and given a digest.
    """
    end = f"-{attempt}-{incarnation}"
    room = MOST_LETTERS - len(last_worker(f"mxdist-{end}", workers))
    if len(job_key) > room:
        digest = hashlib.sha256(job_key.encode()).hexdigest()[:_DIGEST_LETTERS]
        job_key = f"{job_key[: room - _DIGEST_LETTERS - 1].rstrip('-')}-{digest}"
    return f"mxdist-{job_key}{end}"


def token_label(token: str) -> str:
    """Return the value of ``TOKEN_LABEL`` for an attempt."""
    return hashlib.sha256(token.encode()).hexdigest()[:40]


def build(
    job: TrainingJob | EvaluationJob, hosts: Sequence[HostPlan], start: Start, *, secret: str | None
) -> dict[str, Any]:
    """Return the MPIJob.

    :param hosts: those that get ranks; each becomes a worker.
    :param secret: name of the Secret with the keys for S3 and MLflow; None: there are none.
    """
    asked = job.cluster.kubernetes
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "MPIJob",
        "metadata": {
            "name": job_name(start.job_key, start.attempt, start.incarnation, workers=len(hosts)),
            "namespace": asked.namespace,
            "labels": {**_labels(job, start), **({QUEUE_LABEL: asked.queue} if asked.queue else {})},
            "annotations": {**_notes(start), NONCE_NOTE: start.nonce},
        },
        "spec": {
            "launcherCreationPolicy": "WaitForWorkersReady",
            "mpiImplementation": "OpenMPI",
            "slotsPerWorker": max(host.slots for host in hosts),
            "sshAuthMountPath": SSH_FOLDER,
            "runPolicy": _run_policy(job, len(hosts)),
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, "Never", job, start, _launcher(job, start, secret)),
                # A worker whose container dies comes back in its pod, and the supervisor starts the world anew.
                "Worker": _replicas(len(hosts), "OnFailure", job, start, _worker(job)),
            },
        },
    }


def _labels(job: TrainingJob | EvaluationJob, start: Start) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "mxdist",
        "app.kubernetes.io/name": job.name,
        TOKEN_LABEL: token_label(start.token),
    }


def _notes(start: Start) -> dict[str, str]:
    return {
        "mxdist/job-key": start.job_key,
        "mxdist/attempt-number": str(start.attempt),
        INCARNATION_NOTE: str(start.incarnation),
    }


def _run_policy(job: TrainingJob | EvaluationJob, workers: int) -> dict[str, Any]:
    """The supervisor keeps all limits itself; what stands here is for the case that it cannot any more.

    The operator counts the launcher into a gang, unless told otherwise. It starts the launcher when all workers are
    ready, which the gang scheduler would start when the launcher is there: nobody would ever begin.
    """
    asked, deadline_s = job.cluster.kubernetes, job.limits.deadline_s
    net_s = None if deadline_s is None else math.ceil(deadline_s + job.limits.grace_s) + _BOOKS_S + _NET_S
    gang = {
        "minAvailable": workers,
        "minResources": {name: _times(value, workers) for name, value in _resources(asked).items()} or None,
        "priorityClass": asked.priority_class,
        "scheduleTimeoutSeconds": asked.gang_timeout_s,
    }
    return _given(
        {
            "activeDeadlineSeconds": net_s,
            "backoffLimit": 0,
            "cleanPodPolicy": "Running",
            "schedulingPolicy": _given(gang),
            "suspend": bool(asked.queue),
        }
    )


def _replicas(
    count: int, restart: str, job: TrainingJob | EvaluationJob, start: Start, container: dict[str, Any]
) -> dict[str, Any]:
    asked = job.cluster.kubernetes
    spec = {
        "containers": [container],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "imagePullSecrets": [{"name": name} for name in asked.image_pull_secrets] or None,
        "nodeSelector": dict(asked.node_selector) or None,
        "priorityClassName": asked.priority_class,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "serviceAccountName": asked.service_account,
        "terminationGracePeriodSeconds": math.ceil(job.limits.grace_s) + _BOOKS_S,
        # The workers' shared memory is that of the ranks; Kubernetes alone would give 64 MiB.
        "volumes": [{"name": "jobs", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    template = {"metadata": {"labels": _labels(job, start), "annotations": _notes(start)}, "spec": _given(spec)}
    return {"replicas": count, "restartPolicy": restart, "template": template}


def _launcher(job: TrainingJob | EvaluationJob, start: Start, secret: str | None) -> dict[str, Any]:
    document = json.dumps(start.document, sort_keys=True, separators=(",", ":"))
    return _given(
        {
            **_container("supervisor", job),
            "command": [_literal(word) for word in start.command],
            "env": [
                *({"name": name, "value": text} for name, text in start.texts.items()),
                {"name": DOCUMENT_NAME, "value": _literal(document)},
                {"name": "PYTHONUNBUFFERED", "value": "1"},
            ],
            "envFrom": [{"secretRef": {"name": secret}}] if secret else None,
            "resources": {"limits": dict(_LAUNCHER_LIMITS), "requests": dict(_LAUNCHER_REQUESTS)},
        }
    )


def _worker(job: TrainingJob | EvaluationJob) -> dict[str, Any]:
    resources = _resources(job.cluster.kubernetes)
    return _given(
        {
            **_container("worker", job),
            "command": ["node-sshd"],
            "env": [{"name": "MXDIST_SSH_PAIR", "value": SSH_FOLDER}],
            "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
            "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 5},
            "resources": {"limits": resources, "requests": dict(resources)} if resources else None,
        }
    )


def _container(name: str, job: TrainingJob | EvaluationJob) -> dict[str, Any]:
    return {
        "name": name,
        "image": job.cluster.kubernetes.image,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # The last words of one that never got to the run store stand in its status then.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "jobs", "mountPath": job.cluster.workdir or WORKDIR},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # shared memory, not a temporary file
        ],
    }


def _resources(asked: Kubernetes) -> dict[str, str]:
    """Return what one worker gets: asked for and at most, so that no other pod can take it away."""
    gpus = str(asked.gpus_per_worker) if asked.gpus_per_worker else None
    return _given({"cpu": asked.cpus_per_worker, "memory": asked.memory_per_worker, "nvidia.com/gpu": gpus})


def _times(quantity: str, count: int) -> str:
    found = _QUANTITY.match(quantity)
    if found is None:
        raise ValueError(f"{quantity!r} is no quantity")
    return f"{Decimal(found[1]) * count:f}{found[2]}"


def _literal(text: str) -> str:
    """Return what Kubernetes makes this text of: it replaces ``$(NAME)`` and takes ``$$`` for one ``$``."""
    return text.replace("$", "$$")


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that have a value: null is not the same as nothing for the API server."""
    return {name: value for name, value in values.items() if value is not None}
