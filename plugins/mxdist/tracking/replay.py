"""Complete a run from the run store alone, after MLflow was away while the training ended."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mxdist.errors import MxdistError
from mxdist.spec import EvaluationJob, JobState, TrainingJob
from mxdist.store import Attempt, Cause, Lease, Result
from mxdist.tracking import models
from mxdist.tracking.client import Client, Login
from mxdist.tracking.delivery import BATCH, Delivery, Ending, Progress, TrackingOutcome
from mxdist.tracking.journal import Record
from mxdist.tracking.points import Sieve, chain, mirrored, points

_LEASE_S = 120.0


def replay(
    attempt: Attempt, job: TrainingJob | EvaluationJob, *, login: Login | None = None, uri: str | None = None
) -> TrackingOutcome:
    """Send what MLflow does not have yet of an attempt that has ended; what is missing then, the outcome says.

    A supervisor may have closed the run and been killed before its result: a run whose state is not that of the result
    is closed anew. So is that of a preempted training that nobody goes on with (see `last_word`).

    :param uri: the MLflow server as seen from here, if the job names it otherwise.
    """
    uri = uri or job.tracking.uri
    if uri is None:
        return TrackingOutcome()
    progress = Progress()
    try:
        progress = Progress.read(attempt)
        result = attempt.result()
        if result is None and not progress.complete:
            return progress.outcome(complete=False, message=f"attempt {attempt.number} has not ended")
        if result is None or (progress.complete and progress.closed in (None, last_word(attempt, result).state.value)):
            return progress.outcome()
        return _under_lease(attempt, job, result, Client(uri, login))
    except MxdistError as error:
        return progress.outcome(complete=False, message=str(error))


def last_word(attempt: Attempt, result: Result) -> Result:
    """Return the result as MLflow must tell it.

    A preempted training's run stays open for the attempt that goes on with it. When none does, because the attempt
    was given up or somebody had cancelled it, its run is closed as that of a cancelled one, with a cause that says so.
    """
    if result.state is not JobState.PREEMPTED or _successor(attempt) is not None:
        return result
    intent = attempt.given_up() or attempt.cancel_intent()
    if intent is None or intent.by == "deadline":  # the next attempt resumes after a deadline
        return result
    message = f"preempted, and nobody goes on with it: {intent.reason}"
    return replace(result, state=JobState.CANCELLED, cause=Cause("given-up", message))


def batches(attempts: list[Attempt]) -> Iterator[tuple[int, list[Record]]]:
    """Yield ``(attempt number, records)`` of everything mirrored, in order, at most a batch at a time."""
    for attempt in attempts:
        batch: list[Record] = []
        for record in mirrored(attempt):
            batch.append(record)
            if len(batch) == BATCH:
                yield attempt.number, batch
                batch = []
        if batch:
            yield attempt.number, batch


def _under_lease(attempt: Attempt, job: TrainingJob | EvaluationJob, result: Result, client: Client) -> TrackingOutcome:
    newer = _successor(attempt)
    if newer is not None:
        ahead = Progress.read(newer)
        if ahead.complete:
            return ahead.outcome()
        return ahead.outcome(complete=False, message=f"attempt {newer.number} goes on with this run")
    lease = Lease(attempt.job.store, f"mlflow/{attempt.claim.origin}/replay", ttl_s=_LEASE_S)
    if not lease.acquire():
        return Progress.read(attempt).outcome(complete=False, message="somebody else is completing this run")
    try:
        delivery = Delivery(attempt, job, client)
        delivery.open(working=False)
        if delivery.gone:
            delivery.abandon()
            return delivery.progress.outcome()
        return _complete(delivery, attempt, result)
    finally:
        lease.release()


def _complete(delivery: Delivery, attempt: Attempt, result: Result) -> TrackingOutcome:
    sieve = Sieve()
    for number, records in batches(chain(attempt)):
        delivery.send(number, records, points(sieve, number, records))
    told = last_word(attempt, result)
    with tempfile.TemporaryDirectory() as folder:
        delivery.finish(Ending(told.state, told.cause, result.ended_at, lambda: _model(attempt, Path(folder))))
    return delivery.progress.outcome()


def _model(attempt: Attempt, folder: Path) -> Path | None:
    store = attempt.store.child(models.MODEL)
    return models.fetch(store, folder / models.MODEL) if store.exists(models.MANIFEST) else None


def _successor(attempt: Attempt) -> Attempt | None:
    """Return the newest attempt that goes on with the same training, whatever has begun from scratch since."""
    latest = attempt.job.latest()
    for number in range(latest.number if latest else 0, attempt.number, -1):
        later = attempt.job.attempt(number)
        if later.claim.origin == attempt.claim.origin:
            return later
    return None
