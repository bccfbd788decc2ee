"""Every error that mxdist raises on purpose.

::

    MxdistError
    |-- SpecError            the job as written cannot run: every wrong field at once
    |-- PreflightError       the place where it should run is not ready
    |-- StoreError           the run store or S3 answered wrongly
    |   |-- NotFound         no such document
    |   `-- Fenced           a newer attempt owns this job: stop writing
    |-- DataError            a dataset cannot be staged, found or trusted
    |-- CheckpointError      a checkpoint is torn, foreign or does not fit
    |-- LaunchError          the job could not be started, reached or ended
    |   `-- HostLost         ... because one of its hosts cannot be reached
    |-- TrainingFailed       the job ran and ended badly
    |   |-- StalledError     ... because a rank stopped making progress
    |   |-- NonFiniteError   ... because a loss or gradient was NaN or infinite
    |   `-- DeadlineError    ... because its time was up
    |-- JobCancelled         somebody asked for its end
    `-- TrackingError        MLflow could not be reached or refused
        `-- RegistryError    a model version, its alias or its record is not as expected

Each says what happened (``str(error)``), what to do about it (``hint``) and whether trying the same thing
again can help (``retryable``). ``exit_code`` is what the command line ends with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class MxdistError(Exception):
    """Base of all errors raised on purpose.

    :param message: one sentence: what happened, and where.
    :param hint: one sentence: what to do about it.
    """

    retryable: bool = False
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str = "", retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        if not self.hint or not self.message:
            return self.hint or self.message
        # What somebody else said, such as the system, ends without a full stop.
        stop = "" if self.hint.startswith("\n") or self.message.rstrip().endswith((".", "!", "?", ":", ";")) else "."
        return f"{self.message.rstrip()}{stop} {self.hint}"


@dataclass(frozen=True)
class Problem:
    """One wrong field: ``path`` as in ``optimizer.learning_rate``, and what is wrong with it."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecError(MxdistError):
    """The job as written cannot run. Carries every problem, not only the first."""

    exit_code = 2

    def __init__(self, what: str, problems: Sequence[Problem]) -> None:
        self.what = what
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__(f"{what} has {count}:\n{lines}")


class PreflightError(MxdistError):
    """The place where the job should run is not ready."""

    exit_code = 3


class StoreError(MxdistError):
    """The run store or S3 answered wrongly, or not at all."""

    retryable = True
    exit_code = 4


class NotFound(StoreError):
    """There is no such document."""

    retryable = False


class Fenced(StoreError):
    """A newer attempt owns this job; the caller must stop writing."""

    retryable = False


class DataError(MxdistError):
    """A dataset cannot be staged, found or trusted."""

    exit_code = 5


class CheckpointError(MxdistError):
    """A checkpoint is torn, comes from elsewhere, or does not fit the job."""

    exit_code = 6


class LaunchError(MxdistError):
    """The job could not be started, reached or ended."""

    retryable = True
    exit_code = 7


class HostLost(LaunchError):
    """A host of a job cannot be reached, or no longer.

    :param host: its name.
    :param why: what is known of it.
    """

    def __init__(self, host: str, why: str, *, hint: str = "", retryable: bool | None = None) -> None:
        super().__init__(f"host {host} is lost: {why}", hint=hint, retryable=retryable)
        self.host = host


class TrainingFailed(MxdistError):
    """The job ran and ended badly.

    :param rank: the first rank that failed, if one did.
    :param host: the host of that rank.
    :param rank_exit_code: that rank's exit code (negative: killed by this signal).
    :param log_uri: where its log can be read.
    """

    exit_code = 8

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        rank_exit_code: int | None = None,
        log_uri: str | None = None,
        hint: str = "",
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, hint=hint, retryable=retryable)
        self.rank = rank
        self.host = host
        self.rank_exit_code = rank_exit_code
        self.log_uri = log_uri


class StalledError(TrainingFailed):
    """A rank stopped making progress."""

    retryable = True


class NonFiniteError(TrainingFailed):
    """A loss or a gradient was NaN or infinite."""


class DeadlineError(TrainingFailed):
    """The attempt's time was up."""

    exit_code = 9


class JobCancelled(MxdistError):
    """Somebody asked for the job's end."""

    exit_code = 130


class TrackingError(MxdistError):
    """MLflow could not be reached, or refused."""

    retryable = True
    exit_code = 10


class RegistryError(TrackingError):
    """A model version, its alias or its promotion record is not as expected."""

    retryable = False
