"""What the state of an MPIJob and its pods means. Pure: JSON of the API server in, words out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mxdist.launch.mpijob import INCARNATION_NOTE, QUEUE_LABEL

PATIENCE_S = 600.0
"""An image that cannot be pulled, a worker that ends at once, or a silent operator, is waited for so long."""

_NEVER = {"InvalidImageName", "ErrImageNeverPull"}
_HARDLY = {
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImagePull",
    "ImagePullBackOff",
    "RunContainerError",
}
_LAST_WORDS = 600


@dataclass(frozen=True)
class Standing:
    """Where an MPIJob stands.

    :param phase: ``new``, ``queued``, ``starting``, ``running``, ``succeeded``, ``failed`` or ``deleted``.
    :param message: why, in words of the cluster; may be empty.
    """

    phase: str
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing will run any more."""
        return self.phase in ("succeeded", "failed", "deleted")


def number_of(job: Mapping[str, Any]) -> int:
    """Return which start of its attempt an MPIJob is."""
    return int(job["metadata"].get("annotations", {}).get(INCARNATION_NOTE, 0))


def standing(job: Mapping[str, Any]) -> Standing:
    """Return where an MPIJob stands, by its conditions.

    A worker that is evicted makes the operator call the job failed, although its launcher goes on: what counts is the
    time of completion as well.
    """
    found = _conditions(job)
    for kind, phase in (("Succeeded", "succeeded"), ("Failed", "failed")):
        if kind in found and job["status"].get("completionTime"):
            return Standing(phase, _reason(found[kind]))
    if "Failed" in found:
        return Standing("running", _reason(found["Failed"]))
    if job["spec"]["runPolicy"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
        return Standing("queued", f"it waits in queue {queue}" if queue else "it is suspended")
    if "Running" in found:
        return Standing("running")
    return Standing("starting", _ready(job)) if found else Standing("new")


def trouble(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], *, now: float) -> str:
    """Return why an MPIJob whose supervisor has not been heard of will never run; "" if it still may.

    :param now: Unix time.
    """
    seen = standing(job)
    if seen.ended:
        return _ended(job, seen, pods)
    age_s = now - _unix(job["metadata"]["creationTimestamp"])
    if seen.phase == "new" and age_s > PATIENCE_S:
        return (
            f"the mpi-operator has not taken it up for {age_s:.0f} s: it does not run, does not look at this "
            "namespace, or refuses the job"
        )
    return next(_stuck(pods, now), "")


def _ended(job: Mapping[str, Any], seen: Standing, pods: Sequence[Mapping[str, Any]]) -> str:
    said = next(_last_words(pods), "")
    return f"it {seen.phase} before its supervisor began: {said or seen.message or 'for no reason that is told'}"


def _stuck(pods: Sequence[Mapping[str, Any]], now: float) -> Iterator[str]:
    for pod in pods:
        for status in pod.get("status", {}).get("containerStatuses", []):
            waiting = status.get("state", {}).get("waiting", {})
            reason, name = waiting.get("reason", ""), pod["metadata"]["name"]
            old = now - _unix(pod["metadata"]["creationTimestamp"]) > PATIENCE_S
            if reason in _NEVER or (reason in _HARDLY and old):
                parts = (reason, waiting.get("message"), _said(status.get("lastState", {}).get("terminated", {})))
                yield f"pod {name} cannot start: {': '.join(part for part in parts if part)}"


def _last_words(pods: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what failed containers said, the launcher's first."""
    for pod in sorted(pods, key=lambda one: "-worker-" in one["metadata"]["name"]):
        for status in pod.get("status", {}).get("containerStatuses", []):
            ended = status.get("state", {}).get("terminated", {})
            if ended.get("exitCode"):
                words = f"pod {pod['metadata']['name']} ended with exit code {ended['exitCode']}: {_said(ended)}"
                yield words.rstrip(": ")


def _said(ended: Mapping[str, Any]) -> str:
    return str(ended.get("message") or ended.get("reason") or "").strip()[-_LAST_WORDS:]


def _ready(job: Mapping[str, Any]) -> str:
    workers = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    active = job["status"].get("replicaStatuses", {}).get("Worker", {}).get("active", 0)
    return f"{active} of {workers} workers run"


def _conditions(job: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = job.get("status", {}).get("conditions", [])
    return {one["type"]: one for one in found if one["status"] == "True"}


def _reason(condition: Mapping[str, Any]) -> str:
    return ": ".join(part for part in (condition.get("reason"), condition.get("message")) if part)


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
