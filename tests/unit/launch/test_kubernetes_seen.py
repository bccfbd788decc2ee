"""What the states of MPIJobs and pods mean, and what a job takes of a quota."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from mxdist.errors import LaunchError
from mxdist.launch.kubernetes_api import Exists, Gone, Missing, refusal
from mxdist.launch.kubernetes_check import amount, demand
from mxdist.launch.kubernetes_seen import PATIENCE_S, standing, trouble

MADE = "2026-01-01T00:00:00Z"
MADE_AT = 1767225600.0  # the same moment


def job(
    *conditions: tuple[str, str], completed: bool = False, suspend: bool = False, queue: str = ""
) -> dict[str, Any]:
    return {
        "metadata": {"creationTimestamp": MADE, "labels": {"kueue.x-k8s.io/queue-name": queue} if queue else {}},
        "spec": {"runPolicy": {"suspend": suspend}, "mpiReplicaSpecs": {"Worker": {"replicas": 2}}},
        "status": {
            "conditions": [{"type": kind, "status": value, "message": "why"} for kind, value in conditions],
            **({"completionTime": MADE} if completed else {}),
        },
    }


def pod(name: str, **state: Any) -> dict[str, Any]:
    metadata = {"name": name, "creationTimestamp": MADE}
    return {"metadata": metadata, "status": {"containerStatuses": [{"state": state}]}}


CREATED = ("Created", "True")


@pytest.mark.parametrize(
    ("seen", "phase", "message"),
    [
        ({**job(), "status": {}}, "new", ""),
        (job(CREATED), "starting", "0 of 2 workers run"),
        (job(CREATED, ("Suspended", "True"), suspend=True), "queued", "it is suspended"),
        (job(suspend=True, queue="gpus"), "queued", "it waits in queue gpus"),
        (job(CREATED, ("Running", "True")), "running", ""),
        (job(CREATED, ("Running", "False"), ("Suspended", "False")), "starting", "0 of 2 workers run"),
        (job(CREATED, ("Running", "True"), ("Succeeded", "True"), completed=True), "succeeded", "why"),
        (job(CREATED, ("Failed", "True"), completed=True), "failed", "why"),
        (job(CREATED, ("Failed", "True")), "running", "why"),  # an evicted worker; the launcher goes on
    ],
)
def test_phase_follows_the_conditions(seen: dict[str, Any], phase: str, message: str) -> None:
    assert (standing(seen).phase, standing(seen).message) == (phase, message)


def test_silent_operator_is_told_after_a_while() -> None:
    silent = {**job(), "status": {}}
    assert trouble(silent, [], now=MADE_AT + PATIENCE_S - 1) == ""
    assert "mpi-operator has not taken it up for 601 s" in trouble(silent, [], now=MADE_AT + PATIENCE_S + 1)
    assert trouble(job(suspend=True), [], now=MADE_AT + 1e6) == ""  # a queue may be long


def test_image_that_cannot_be_pulled_is_told_after_a_while() -> None:
    pods = [pod("a-worker-0", running={}), pod("a-worker-1", waiting={"reason": "ImagePullBackOff", "message": "no"})]
    assert trouble(job(CREATED), pods, now=MADE_AT + PATIENCE_S - 1) == ""
    assert trouble(job(CREATED), pods, now=MADE_AT + PATIENCE_S + 1) == (
        "pod a-worker-1 cannot start: ImagePullBackOff: no"
    )


def test_image_name_that_is_none_is_told_at_once() -> None:
    pods = [pod("a-worker-0", waiting={"reason": "InvalidImageName"})]
    assert trouble(job(CREATED), pods, now=MADE_AT) == "pod a-worker-0 cannot start: InvalidImageName"


def test_worker_that_ends_again_and_again_is_told_after_a_while() -> None:
    crashing = pod("a-worker-1", waiting={"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting"})
    (status,) = crashing["status"]["containerStatuses"]
    status["lastState"] = {"terminated": {"exitCode": 255, "reason": "Error", "message": "sshd: no hostkeys\n"}}
    pods = [pod("a-worker-0", running={}), crashing]
    assert trouble(job(CREATED), pods, now=MADE_AT + PATIENCE_S - 1) == ""
    told = "pod a-worker-1 cannot start: CrashLoopBackOff: back-off 5m0s restarting"
    assert trouble(job(CREATED), pods, now=MADE_AT + PATIENCE_S + 1) == f"{told}: sshd: no hostkeys"
    del status["lastState"]["terminated"]["message"]
    assert trouble(job(CREATED), pods, now=MADE_AT + PATIENCE_S + 1) == f"{told}: Error"


def test_last_words_of_the_launcher_come_first() -> None:
    pods = [
        pod("a-worker-0", terminated={"exitCode": 137, "reason": "OOMKilled"}),
        pod("a-launcher-x", terminated={"exitCode": 1, "message": "cannot read s3://runs\n"}),
    ]
    said = trouble(job(("Failed", "True"), completed=True), pods, now=MADE_AT)
    assert said == (
        "it failed before its supervisor began: pod a-launcher-x ended with exit code 1: cannot read s3://runs"
    )
    said = trouble(job(("Failed", "True"), completed=True), [], now=MADE_AT)
    assert said == "it failed before its supervisor began: why"


@pytest.mark.parametrize(
    ("text", "number"), [("500m", "0.5"), ("2", "2"), ("1.5Gi", str(3 * 2**29)), ("10k", "10000"), ("1Ei", str(2**60))]
)
def test_quantities_are_numbers(text: str, number: str) -> None:
    assert amount(text) == Decimal(number)


def test_job_takes_of_a_quota_what_all_its_pods_take() -> None:
    def role(count: int, **resources: Any) -> dict[str, Any]:
        return {"replicas": count, "template": {"spec": {"containers": [{"resources": resources}]}}}

    launcher = role(1, requests={"cpu": "250m"}, limits={"cpu": "2"})
    worker = role(3, requests={"cpu": "500m", "nvidia.com/gpu": "2"}, limits={"nvidia.com/gpu": "2"})
    taken = demand({"spec": {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}}})

    assert taken["pods"] == 4
    assert taken["requests.cpu"] == taken["cpu"] == Decimal("1.75")
    assert taken["limits.cpu"] == 2
    assert taken["requests.nvidia.com/gpu"] == 6
    assert taken["count/mpijobs.kubeflow.org"] == 1


@pytest.mark.parametrize(
    ("code", "said", "kind", "hint", "retryable"),
    [
        (410, "too old resource version: 1 (9)", Gone, "", True),
        (404, "404 page not found\n", Missing, "install Kubeflow's mpi-operator", False),
        (404, 'namespaces "x" not found', Missing, "Create the namespace", False),
        (404, 'mpijobs.kubeflow.org "x" not found', Missing, "", False),
        (409, 'mpijobs.kubeflow.org "x" already exists', Exists, "", True),
        (
            409,
            'Operation cannot be fulfilled on resourcequotas "q": the object has been modified',
            LaunchError,
            "",
            True,
        ),
        (408, "request timeout", LaunchError, "", True),
        (0, "connection lost", LaunchError, "", True),
        (418, "I am a teapot", LaunchError, "", False),
        (401, "Unauthorized", LaunchError, "log in anew", False),
        (403, 'User "a" cannot create resource "mpijobs" in API group', LaunchError, "docs/kubernetes.md", False),
        (403, "x is forbidden: exceeded quota: q, requested: pods=3", LaunchError, "raise the namespace's quota", True),
        (403, "failed quota: q: must specify limits.cpu", LaunchError, "Ask for cpu and memory", False),
        (403, 'violates PodSecurity "restricted:latest"', LaunchError, "admission control", False),
        (400, 'admission webhook "policy" denied the request: no', LaunchError, "A policy of the cluster", False),
        (500, 'failed calling webhook "policy": connection refused', LaunchError, "is down", True),
        (400, 'strict decoding error: unknown field "spec.x"', LaunchError, "versions of mpi-operator", False),
        (422, "MPIJob is invalid: spec.x: Invalid value", LaunchError, "versions of mpi-operator", False),
        (429, "too many requests", LaunchError, "", True),
        (503, "the server is currently unable to handle the request", LaunchError, "", True),
    ],
)
def test_refusals_say_what_to_do(code: int, said: str, kind: type[LaunchError], hint: str, retryable: bool) -> None:
    error = refusal("create MPIJob x", code, {"message": said})
    assert type(error) is kind
    assert error.message.startswith(f"cannot create MPIJob x: {said.strip()}")
    assert hint in error.hint
    assert error.retryable is retryable
