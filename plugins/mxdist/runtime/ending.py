"""How a world ends, and what is to be said of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from mxdist.errors import HostLost
from mxdist.runtime.blame import Failure
from mxdist.spec import JobState, Limits
from mxdist.store import CancelIntent, Cause

_FULL_BYTES = 64 << 10


class Stop(StrEnum):
    """Why a world that works is asked to end. The first one that applies counts."""

    REPLACED = "replaced"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    PREEMPT = "preempt"


STOPPING = {
    Stop.CANCEL: "the job was cancelled",
    Stop.DEADLINE: "the deadline has passed",
    Stop.PREEMPT: "the host wants this process to end",
}


@dataclass(frozen=True)
class Ended:
    """How one world ended: by itself, by a failure, or because it was asked to."""

    stop: Stop | None = None
    failure: Failure | None = None


def host_lost(error: HostLost) -> Failure:
    """Return what it means that a host cannot be reached."""
    return Failure(Cause("host", error.message, error.retryable, host=error.host), restart=error.retryable)


def stopped(stop: Stop, cancel: CancelIntent | None, limits: Limits, host: str) -> tuple[JobState, Cause]:
    """Return how an attempt ends that was asked to.

    :param host: the supervisor's own.
    """
    if stop is Stop.DEADLINE:
        after = f" {limits.deadline_s:g} s after its submission" if limits.deadline_s else ""
        return JobState.DEADLINE, Cause("deadline", f"the attempt's time was up{after}", False)
    if stop is Stop.CANCEL and cancel is not None:
        return JobState.CANCELLED, Cause("cancel", f"cancelled by {cancel.by}: {cancel.reason}", False)
    return JobState.PREEMPTED, Cause("preempted", "the supervisor was asked to end (SIGTERM)", True, host=host)


def or_full_disk(cause: Cause, folder: Path) -> Cause:
    """Name the disk if it is full: whatever else the ranks died of, their last words may have found no place."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return cause
    full = found.f_bavail * found.f_frsize < _FULL_BYTES or (found.f_files > 0 and found.f_favail == 0)
    return replace(cause, message=f"{cause.message}; the disk of {folder} is full") if full else cause
