"""The states of a job, shared by every room and by the run store."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where an attempt stands. The last five are final."""

    SUBMITTED = "SUBMITTED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to the attempt."""
        return self in _FINAL

    @property
    def resumable(self) -> bool:
        """Whether the next attempt goes on from this one's last checkpoint instead of starting again."""
        return self in {JobState.FAILED, JobState.DEADLINE, JobState.PREEMPTED}


_FINAL = {JobState.SUCCEEDED, JobState.FAILED, JobState.DEADLINE, JobState.CANCELLED, JobState.PREEMPTED}
