"""How an attempt ends: its model published, its MLflow run closed, its result written, in this order.

What the ranks achieved is first noted on the local disk, so that a supervisor that is killed in between is followed by
one that publishes, not by one that trains again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mxdist.barriers import reach
from mxdist.errors import MxdistError, StoreError
from mxdist.runtime.place import read_json, write_json
from mxdist.runtime.reporter import LOW_PRIORITY
from mxdist.spec import EvaluationJob, JobState, TrainingJob
from mxdist.store import Attempt, Cause, Result

if TYPE_CHECKING:
    from mxdist.tracking.forwarder import Forwarder, TrackingOutcome

log = logging.getLogger("mxdist.supervisor")

T = TypeVar("T")

OUTCOME = "outcome.json"
_PATIENCE_S = 3600.0


@dataclass(frozen=True)
class Outcome:
    """How the work of an attempt ended, before anything of it is published.

    :param restarts: world restarts within the attempt.
    :param model_dir: the exported model on this host, if there is one.
    """

    state: JobState
    cause: Cause | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    samples_per_s: float | None = None
    restarts: int = 0
    model_dir: str | None = None

    def save(self, folder: Path) -> None:
        """Note the outcome in the attempt's scratch folder."""
        write_json(folder / OUTCOME, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Outcome | None:
        """Return the outcome that an earlier supervisor noted, if one did."""
        found = read_json(folder / OUTCOME)
        if not found:
            return None
        cause = Cause.load(found["cause"]) if found.get("cause") else None
        return cls(**{**found, "state": JobState(found["state"]), "cause": cause})


class Tracker:
    """MLflow as the supervisor sees it: started aside, at low priority, and never a reason to fail.

    :param plan_params: facts of the plan, shown beside the job's own parameters.
    :ivar trouble: why tracking could not be started, or closed.
    """

    def __init__(
        self, attempt: Attempt, job: TrainingJob | EvaluationJob, journal: Path, plan_params: dict[str, Any]
    ) -> None:
        self._attempt, self._job, self._journal, self._params = attempt, job, journal, plan_params
        self._forwarder: Forwarder | None = None
        self.trouble = "" if job.tracking.uri is None else "tracking did not start in time"
        self._thread = threading.Thread(target=self._start, name="tracker", daemon=True)

    def start(self) -> None:
        """Begin, in the background; the journal is whole by then."""
        self._thread.start()

    @property
    def run(self) -> tuple[str | None, str | None]:
        """The run's id and its page, once they are known."""
        forwarder = self._forwarder
        return (forwarder.run_id, forwarder.run_url) if forwarder else (None, None)

    def close(self, outcome: Outcome, model: Path | None) -> TrackingOutcome | None:
        """Send what is left, close the run with its true state; None if tracking never worked."""
        wait_s = self._job.tracking.wait_s
        self._thread.join(wait_s)
        if self._forwarder is None:
            return None
        try:
            return self._forwarder.close(outcome.state, cause=outcome.cause, model_dir=model, timeout_s=wait_s)
        except Exception as error:
            log.exception("tracking could not be closed; `mxdist reconcile` completes it later")
            self.trouble = f"tracking could not be closed: {error}"
            return None

    def _start(self) -> None:
        # Threads inherit the priority of the one that starts them: importing and talking to MLflow must not slow ranks.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        try:
            from mxdist.tracking.forwarder import Forwarder

            forwarder = Forwarder(self._attempt, self._job, self._journal, self._params)
            forwarder.start()
        except Exception as error:
            log.exception("tracking could not be started; `mxdist reconcile` completes it later")
            self.trouble = f"tracking could not be started: {error}"
            return
        self._forwarder = forwarder


class Finisher:
    """Publishes an outcome.

    :param tracker: MLflow.
    :param impatient: says whether this process was told to end; an outage is then no longer waited out.
    """

    def __init__(
        self,
        attempt: Attempt,
        job: TrainingJob | EvaluationJob,
        folder: Path,
        tracker: Tracker,
        impatient: Callable[[], bool],
    ) -> None:
        self._attempt, self._job, self._folder = attempt, job, folder
        self._tracker = tracker
        self._impatient = impatient

    def finish(self, outcome: Outcome) -> Result:
        """Publish the model, close the run, write the result; return the result that counts.

        :raises Fenced: a newer attempt owns the job.
        :raises StoreError: the run store did not answer for an hour, or until this process was told to end.
        """
        exported = Path(outcome.model_dir) if outcome.model_dir else None
        wrapped = self._wrap(exported)
        self._may_still_write("model")
        digest = self._publish(wrapped or exported)
        self._may_still_write("mlflow")
        tracked = self._tracker.close(outcome, wrapped)
        self._may_still_write("result")
        result = self._result(outcome, digest, tracked)
        counts = self.patiently(lambda: self._attempt.finish(result))
        reach(self._attempt.claim.job_key, "supervisor-after-result")
        return counts

    def _may_still_write(self, what: str) -> None:
        """Make sure, before each step of the end, that no newer attempt owns the job: each may take minutes."""
        reach(self._attempt.claim.job_key, f"supervisor-before-{what}")
        self.patiently(self._attempt.check_fence)

    def patiently(self, act: Callable[[], T]) -> T:
        """Do something with the run store, over and over while that does not answer."""
        give_up, pause_s = time.monotonic() + _PATIENCE_S, 0.5
        while True:
            try:
                return act()
            except StoreError as error:
                if not error.retryable or self._impatient() or time.monotonic() > give_up:
                    raise
                log.warning("trying again in %.0f s: %s", pause_s, error)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 15.0)

    def _wrap(self, exported: Path | None) -> Path | None:
        """Return the model as MLflow wants it, or None if that cannot be made: it is then published as it is."""
        if exported is None:
            return None
        try:
            from mxdist.tracking import models

            return models.build(exported, self._folder / "mlflow-model", job=self._job, claim=self._attempt.claim)
        except (MxdistError, ImportError, OSError) as error:
            log.warning("the model is published as it was exported, without MLflow's wrapping: %s", error)
            return None

    def _publish(self, model: Path | None) -> str | None:
        if model is None:
            return None
        from mxdist.tracking import models

        return self.patiently(lambda: models.publish(model, self._attempt.store))

    def _result(self, outcome: Outcome, digest: str | None, tracked: TrackingOutcome | None) -> Result:
        now, claim = time.time(), self._attempt.claim
        run_id, run_url = self._tracker.run
        complete = tracked.complete if tracked else self._job.tracking.uri is None
        trouble = tracked.message if tracked else self._tracker.trouble
        return Result(
            state=outcome.state,
            ended_at=now,
            cause=outcome.cause,
            metrics=outcome.metrics,
            model_uri=f"{self._attempt.store.uri}/model" if digest else None,
            model_digest=digest,
            outputs=outcome.outputs,
            steps=outcome.steps,
            restarts=outcome.restarts,
            duration_s=now - claim.submitted_at,
            samples_per_s=outcome.samples_per_s,
            log_uri=f"{self._attempt.store.uri}/logs",
            mlflow_run_id=tracked.run_id if tracked else run_id,
            mlflow_run_url=tracked.run_url if tracked else run_url,
            registered_version=tracked.registered_version if tracked else None,
            tracking_complete=complete,
            tracking_error=None if complete else trouble or None,
        )
