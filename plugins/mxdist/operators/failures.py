"""From mxdist's errors to Airflow's: what a retry can help fails for now, all else fails for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowNotFoundException

from mxdist.errors import DeadlineError, JobCancelled, MxdistError, NonFiniteError, StalledError, TrainingFailed
from mxdist.spec import JobState
from mxdist.store import Attempt, Cause, Result

_KINDS: dict[str, type[TrainingFailed]] = {
    "stall": StalledError,
    "nonfinite": NonFiniteError,
    "deadline": DeadlineError,
}


def error_of(attempt: Attempt, result: Result) -> MxdistError:
    """Return the error that says how an attempt ended, when it did not succeed."""
    cause = result.cause or Cause("internal", f"ended as {result.state.value} without a cause")
    what = f"Job {attempt.claim.job_key}, attempt {attempt.number}: {cause.message}"
    if result.state is JobState.CANCELLED:
        return JobCancelled(what, hint="Clear the task to start it again.")
    retryable = result.state is JobState.PREEMPTED or (result.state is JobState.FAILED and cause.retryable)
    known = _KINDS.get(cause.kind, TrainingFailed)
    if result.state is JobState.DEADLINE:
        known = DeadlineError
    return known(
        f"{what}{_where(cause)}",
        rank=cause.rank,
        host=cause.host,
        rank_exit_code=cause.exit_code,
        log_uri=result.log_uri or f"{attempt.store.uri}/logs",
        hint=f"Log: {result.log_uri or f'{attempt.store.uri}/logs'}",
        retryable=retryable,
    )


def _where(cause: Cause) -> str:
    parts = []
    if cause.rank is not None:
        parts.append(f"rank {cause.rank}")
    if cause.host:
        parts.append(f"host {cause.host}")
    if cause.exit_code is not None:
        parts.append(f"signal {-cause.exit_code}" if cause.exit_code < 0 else f"exit code {cause.exit_code}")
    return f" ({', '.join(parts)})." if parts else ""


@contextmanager
def as_airflow() -> Iterator[None]:
    """Turn the errors of mxdist, and a connection that is not there, into those that Airflow knows what to do with."""
    try:
        yield
    except MxdistError as error:
        kind = AirflowException if error.retryable else AirflowFailException
        raise kind(str(error)) from error
    except AirflowNotFoundException as error:
        raise AirflowFailException(f"{error}. Create the connection, or name another in the task.") from error
