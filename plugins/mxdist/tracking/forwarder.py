"""The forwarder: two threads in the supervisor that carry the journal to the run store and to MLflow.

First the run store, then MLflow: whatever MLflow has, the run store has too, so whoever goes on later (the next
attempt, the operator, ``mxdist reconcile``) computes the same points and sends none twice. Nothing here raises into the
supervisor, and nothing of it waits: an outage of any length is a backlog on the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mxdist.errors import Fenced
from mxdist.spec import EvaluationJob, JobState, TrainingJob
from mxdist.store import Attempt, Cause
from mxdist.tracking.client import Client, Login
from mxdist.tracking.delivery import BATCH, Delivery, Ending, Progress, TrackingOutcome
from mxdist.tracking.journal import JournalReader, Record, last_number
from mxdist.tracking.loops import Loop
from mxdist.tracking.mirror import Mirror
from mxdist.tracking.points import Point, Sieve, chain, points
from mxdist.tracking.replay import batches, replay

__all__ = ["Forwarder", "TrackingOutcome", "replay"]

log = logging.getLogger(__name__)

_LATE_TRY_S = 15.0


class Forwarder:
    """Carries one attempt's journal onward while it trains, and closes its run at the end.

    :param journal_path: rank 0's journal; it may not exist yet.
    :param plan_params: facts of the plan (cores, threads, ...) to be seen beside the job's own parameters.
    """

    def __init__(
        self,
        attempt: Attempt,
        job: TrainingJob | EvaluationJob,
        journal_path: Path,
        plan_params: Mapping[str, Any] | None = None,
        *,
        login: Login | None = None,
    ) -> None:
        self._job_key = attempt.claim.job_key
        self._path = journal_path
        self._copier = _Copier(attempt, journal_path)
        self._sender: _Sender | None = None
        if job.tracking.uri:
            delivery = Delivery(attempt, job, Client(job.tracking.uri, login), plan_params)
            self._sender = _Sender(attempt, delivery, self._copier, journal_path)
        self._gave_up = False

    @property
    def run_id(self) -> str | None:
        """The MLflow run, once it is known."""
        return self._sender.progress.run_id if self._sender else None

    @property
    def run_url(self) -> str | None:
        """The run's page, once it is known."""
        return self._sender.progress.run_url if self._sender else None

    def start(self) -> None:
        """Begin, in the background."""
        self._copier.start()
        if self._sender:
            self._sender.start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that is in the journal now has arrived everywhere; return whether it has."""
        goal, give_up = last_number(self._path), time.monotonic() + timeout_s
        done = self._copier.wait(lambda: self._copier.mirror.copied >= goal, give_up)
        if self._sender:
            done = self._sender.drained(goal, give_up) and done
        self._gave_up = not done
        return done

    def close(
        self, state: JobState, *, cause: Cause | None = None, model_dir: Path | None = None, timeout_s: float = 60.0
    ) -> TrackingOutcome:
        """Drain, log and register the model, close the run with its true state, and stop. Never raises.

        :param model_dir: the MLflow model folder that ``models.build`` made, or None.
        :param timeout_s: for all of it; after a drain that failed there is one short try only.
        """
        timeout_s = min(timeout_s, _LATE_TRY_S) if self._gave_up else timeout_s
        give_up = time.monotonic() + timeout_s
        try:
            drained = self.drain(timeout_s)
            if self._sender is None:
                return TrackingOutcome(complete=drained)
            return self._sender.finish(drained, Ending(state, cause, time.time(), lambda: model_dir), give_up)
        except Exception as error:  # the job's end must not hang on its bookkeeping
            log.exception("tracking of %s", self._job_key)
            return TrackingOutcome(self.run_id, self.run_url, complete=False, message=str(error))
        finally:
            self._copier.stop()
            if self._sender:
                self._sender.stop()


class _Copier(Loop):
    """Journal -> run store."""

    def __init__(self, attempt: Attempt, path: Path) -> None:
        super().__init__(f"mirror of {attempt.claim.job_key}")
        self.mirror = Mirror(attempt, path)

    def step(self) -> None:
        self.mirror.catch_up()


class _Sender(Loop):
    """Journal -> MLflow, never ahead of the run store."""

    def __init__(self, attempt: Attempt, delivery: Delivery, copier: _Copier, path: Path) -> None:
        super().__init__(f"tracking of {attempt.claim.job_key}")
        self._attempt = attempt
        self._delivery = delivery
        self._copier = copier
        self._path = path
        self._ending: Ending | None = None
        self._fenced = False
        self._pending: tuple[int, list[Record]] | None = None
        self._points: list[Point] = []
        self._read = self._sent = 0
        self._rewind()

    @property
    def progress(self) -> Progress:
        """How far the delivery has come."""
        return self._delivery.progress

    def step(self) -> None:
        self._check_fence()
        if self._delivery.run is None:
            self._delivery.open(working=True)
            self.announce()
        if not self._delivery.gone:
            self._send_all()
        if self._delivery.gone:
            self._delivery.abandon()
            self.over = True
            return
        self._delivery.try_describe()
        if self._ending is not None:
            self._delivery.finish(self._ending)
            self.over = True

    def drained(self, goal: int, give_up: float) -> bool:
        """Wait until record ``goal`` is sent, or MLflow refuses it; return whether nothing is missing."""
        self.wait(lambda: self._sent >= goal or self.over, give_up)
        return (self._sent >= goal or self.over) and not self._fenced

    def finish(self, drained: bool, ending: Ending, give_up: float) -> TrackingOutcome:
        """Close the run in this thread's own time, as far as ``give_up`` allows."""
        if drained:
            self._ending = ending
            self.wait(lambda: self.over, give_up)
        if self._fenced:
            return self.progress.outcome(complete=False, message="a newer attempt has taken over")
        if self.over:
            return self.progress.outcome()
        what = "the run's end" if drained else "all metrics"
        return self.progress.outcome(complete=False, message=self.trouble or f"MLflow did not take {what} in time")

    def _check_fence(self) -> None:
        try:
            self._attempt.check_fence()
        except Fenced:
            self._fenced = True
            raise

    def _send_all(self) -> None:
        moved = False
        try:
            while not self._stopped and not self._delivery.gone and (batch := self._pending or self._next()):
                self._pending = batch
                number, records = batch
                self._delivery.send(number, records, self._points)
                self._pending = None
                self._sent = records[-1].n if number == self._attempt.number else 0
                self.announce()
                moved = True
        finally:
            if moved:
                self._delivery.save()

    def _next(self) -> tuple[int, list[Record]] | None:
        try:
            number, records = next(self._earlier, (self._attempt.number, []))
        except Exception:
            self._rewind()  # a generator that has raised is spent
            raise
        if not records:
            free = self._copier.mirror.copied - self._read
            records = self._reader.read(min(BATCH, free)) if free > 0 else []
            self._read = records[-1].n if records else self._read
        self._points = list(points(self._sieve, number, records))
        return (number, records) if records else None

    def _rewind(self) -> None:
        """Begin again with the first record; what was sent before is not sent again."""
        self._earlier = self._of_earlier_attempts()
        self._reader = JournalReader(self._path)
        self._sieve = Sieve()
        self._pending = None
        self._read = self._sent = 0

    def _of_earlier_attempts(self) -> Iterator[tuple[int, list[Record]]]:
        yield from batches(chain(self._attempt)[:-1])
