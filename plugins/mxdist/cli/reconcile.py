"""What others left undone: cancels whose supervisor died, and runs that MLflow has not heard the end of."""

from __future__ import annotations

from collections.abc import Iterator

from mxdist.errors import MxdistError
from mxdist.launch import JobClient, Life
from mxdist.store import Attempt, JobRun


def reconcile(client: JobClient) -> Iterator[tuple[str, bool]]:
    """Do what is to do for every job of the store; yield what was done or could not be, and whether it went well."""
    for job_key in client.job_keys():
        try:
            for attempt in _attempts(JobRun(client.runs, job_key)):
                yield from _reconcile(client, attempt)
        except MxdistError as error:  # one broken job must not keep the others waiting
            yield f"{job_key}: {error}", False


def _attempts(run: JobRun) -> Iterator[Attempt]:
    latest = run.latest()
    for number in range(1, latest.number + 1 if latest else 1):
        yield run.attempt(number)


def _reconcile(client: JobClient, attempt: Attempt) -> Iterator[tuple[str, bool]]:
    named = f"{attempt.claim.job_key} attempt {attempt.number}"
    result = attempt.result()
    if result is None and attempt.cancel_intent() is not None and client.launcher.life(attempt) is not Life.ALIVE:
        result = client.cancel(attempt, by="reconciler", reason="its supervisor died", wait_s=0)
        yield f"{named}: ended as {result.state.value}", True
    job = attempt.claim.parsed()
    if result is None or result.tracking_complete or job.tracking.uri is None:
        return
    from mxdist.tracking.forwarder import replay

    outcome = replay(attempt, job)
    done = "MLflow has everything" if outcome.complete else f"MLflow still lacks something: {outcome.message}"
    yield f"{named}: {done}", outcome.complete
