"""One training's way into MLflow, a step at a time; each step may fail, and is then simply taken again."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxdist.errors import MxdistError, NotFound, TrackingError
from mxdist.spec import EvaluationJob, JobState, TrainingJob
from mxdist.store import Attempt, Cause
from mxdist.tracking import models, runs
from mxdist.tracking.client import Client, entities, refused_for_good
from mxdist.tracking.journal import Record
from mxdist.tracking.params import job_params, public
from mxdist.tracking.points import Point, chain

log = logging.getLogger(__name__)

BATCH = 1000
_PARAMS_AT_ONCE = 100
_DESCRIBE_AGAIN_S = 60.0


@dataclass(frozen=True)
class TrackingOutcome:
    """What MLflow has of a training.

    :param complete: nothing is missing there: metrics, state, model.
    """

    run_id: str | None = None
    run_url: str | None = None
    complete: bool = True
    registered_version: str | None = None
    message: str = ""


@dataclass
class Progress:
    """How far an attempt's delivery has come: its ``tracking.json``. Losing it costs work, nothing else.

    :param sent: attempt number -> last record of it that reached the run.
    :param closed: the state that the run was closed with.
    """

    run_id: str | None = None
    run_url: str | None = None
    sent: dict[str, int] = field(default_factory=dict)
    closed: str | None = None
    model_source: str | None = None
    model_digest: str = ""
    registered_version: str | None = None
    complete: bool = False
    message: str = ""

    @classmethod
    def read(cls, attempt: Attempt) -> Progress:
        """Return what an attempt's document says."""
        try:
            document = attempt.store.read_json("tracking.json")
        except NotFound:
            return cls()
        return cls(**{key: value for key, value in document.items() if key in cls.__dataclass_fields__})

    def outcome(self, *, complete: bool | None = None, message: str | None = None) -> TrackingOutcome:
        """Return this as a caller wants it."""
        done = self.complete if complete is None else complete
        text = self.message if message is None else message
        return TrackingOutcome(self.run_id, self.run_url, done, self.registered_version, text)


@dataclass(frozen=True)
class Ending:
    """How a training ended.

    :param model_dir: gives the MLflow model's folder, or None; only called when it is needed.
    """

    state: JobState
    cause: Cause | None
    at: float
    model_dir: Callable[[], Path | None]


class Delivery:
    """Carries one training of one attempt into its MLflow run.

    :param extra_params: more parameters than the job has, such as the plan's.
    """

    def __init__(
        self,
        attempt: Attempt,
        job: TrainingJob | EvaluationJob,
        client: Client,
        extra_params: Mapping[str, Any] | None = None,
    ) -> None:
        self._attempt = attempt
        self._job = job
        self._client = client
        self._extra = dict(extra_params or {})
        self._described = False
        self._describe_at = 0.0
        self.run: runs.RunRef | None = None
        self.progress = Progress()

    def open(self, *, working: bool) -> None:
        """Find or make the run, and describe the job in it.

        :param working: this attempt trains now, so the run is RUNNING again.
        :raises Fenced: a newer attempt trains now.
        """
        self.progress = Progress.read(self._attempt)
        run = runs.find_or_create_run(self._client, self._attempt, self._job)
        sent = self._sent_before(run.run_id)
        self.progress.run_id, self.progress.run_url, self.progress.sent = run.run_id, run.url, sent
        if not run.deleted:
            if working:
                self._attempt.check_fence()  # finding the run may have taken long, and the next attempt has it now
                runs.reopen(self._client, run, self._attempt)
            self._log_params(run)
        self.save()
        self.run = run

    @property
    def gone(self) -> bool:
        """Whether somebody deleted the run in MLflow: then nothing more is sent."""
        return self.run is not None and self.run.deleted

    def send(self, attempt: int, records: Sequence[Record], found: Iterable[Point]) -> None:
        """Send the points that were ``found`` in these records, except those that an earlier call has sent.

        A point that MLflow will never take is dropped with a word about it.
        """
        run, place = self._run(), str(attempt)
        fresh = [point for point in found if point.n > self.progress.sent.get(place, 0)]
        rows = [
            {"key": point.key, "value": point.value, "timestamp": point.time_ms, "step": point.step} for point in fresh
        ]
        self._send(run.run_id, rows)
        if notes := [point.note for point in fresh if point.note]:
            runs.set_tags(self._client, run.run_id, {"mxdist.nonfinite": notes[-1]})
        if not self.gone:
            self.progress.sent[place] = max(records[-1].n, self.progress.sent.get(place, 0))

    def abandon(self) -> None:
        """Note that the run was deleted: nothing is missing any more."""
        log.warning(
            "MLflow run %s was deleted; %s goes on without it", self.progress.run_id, self._attempt.claim.job_key
        )
        self.progress.complete, self.progress.message = True, "the run was deleted in MLflow"
        self.save()

    def save(self) -> None:
        """Write ``tracking.json``."""
        self._attempt.store.write_json("tracking.json", asdict(self.progress))

    def try_describe(self) -> None:
        """Record what is nice to have (configuration, dataset), now and then until it works."""
        if not self._described and time.monotonic() >= self._describe_at:
            self._describe_at = time.monotonic() + _DESCRIBE_AGAIN_S
            self._try(self._describe)

    def _describe(self) -> None:
        if self._described:
            return
        run = self._run()
        number = self._attempt.number
        name = "config.json" if number == self._attempt.claim.origin else f"config-{number}.json"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.write_text(json.dumps(public(self._attempt.claim.job), indent=2, sort_keys=True))
            self._client.call("log_artifact", run.run_id, str(path))
        self._client.call("log_inputs", run.run_id, datasets=_dataset_inputs(self._job))
        self._described = True

    def finish(self, ending: Ending) -> None:
        """Log and register the model, then close the run. A model that cannot be logged does not keep the run open."""
        run, state = self._run(), ending.state
        failures = [self._try(self._describe)]
        if state is JobState.SUCCEEDED:
            failures.append(self._try(lambda: self._log_model(run, ending.model_dir)))
        runs.delete_twins(self._client, run, self._attempt)
        intent = self._attempt.given_up() or self._attempt.cancel_intent()
        marked = state is JobState.CANCELLED and intent is not None and intent.marked_success
        runs.close_run(self._client, run, state, ending.cause, ended_at=ending.at, marked_success=marked)
        self.progress.closed, self.progress.message = state.value, " ".join(filter(None, failures))
        self.progress.complete = not self.progress.message
        self.save()

    def _log_model(self, run: runs.RunRef, model_dir: Callable[[], Path | None]) -> None:
        progress, name = self.progress, self._job.tracking.registered_model
        if progress.model_source is None:
            folder = model_dir()
            if folder is None:
                return
            progress.model_digest = models.digest(folder)
            progress.model_source = models.log(run.run_id, folder, client=self._client)
            self.save()
        if name and progress.registered_version is None:
            tags = models.version_tags(self._attempt, self._job, progress.model_digest)
            progress.registered_version = models.register(
                name, run.run_id, progress.model_source, client=self._client, tags=tags
            )

    def _try(self, step: Callable[[], None]) -> str:
        try:
            step()
        except MxdistError as error:
            log.warning("tracking of %s: %s", self._attempt.claim.job_key, error)
            return str(error)
        return ""

    def _run(self) -> runs.RunRef:
        if self.run is None:
            raise TrackingError("the run is not open")
        return self.run

    def _sent_before(self, run_id: str) -> dict[str, int]:
        """Return what any attempt of this training has sent to this very run."""
        sent: dict[str, int] = {}
        for attempt in chain(self._attempt):
            progress = Progress.read(attempt)
            if progress.run_id == run_id:
                for number, n in progress.sent.items():
                    sent[number] = max(n, sent.get(number, 0))
        return sent

    def _send(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            try:
                self._client.call("log_batch", run_id, metrics=entities("Metric", batch))
            except TrackingError as error:
                if not refused_for_good(error):
                    raise
                self._send_halves(run_id, batch, error)

    def _send_halves(self, run_id: str, rows: list[dict[str, Any]], error: TrackingError) -> None:
        if self._client.call("get_run", run_id).info.lifecycle_stage == "deleted":
            self.run = runs.RunRef("", run_id, self.progress.run_url or "", deleted=True)
            return
        if len(rows) == 1:
            log.warning("MLflow takes no metric %r: %s", rows[0]["key"], error)
            runs.set_tags(self._client, run_id, {"mxdist.rejected": f"{rows[0]['key']}: {error}"})
            return
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            self._send(run_id, half)

    def _log_params(self, run: runs.RunRef) -> None:
        """Log what the training began with as parameters; what a later attempt changed, as tags beside them."""
        first = job_params(runs.origin_claim(self._attempt).job)
        mine = job_params(self._attempt.claim.job, self._extra)
        known = dict(self._client.call("get_run", run.run_id).data.params)
        began_here = self._attempt.number == self._attempt.claim.origin
        wanted = {**(mine if began_here else {}), **first}
        new = [{"key": key, "value": value} for key, value in wanted.items() if key not in known]
        for start in range(0, len(new), _PARAMS_AT_ONCE):
            self._client.call("log_batch", run.run_id, params=entities("Param", new[start : start + _PARAMS_AT_ONCE]))
        known = {**wanted, **known}
        changed = {key: value for key, value in mine.items() if known.get(key) != value}
        if changed:
            prefix = f"mxdist.retry.{self._attempt.number}."
            tags = {(prefix + key)[:250]: value for key, value in list(changed.items())[:_PARAMS_AT_ONCE]}
            runs.set_tags(self._client, run.run_id, tags)


def _dataset_inputs(job: TrainingJob | EvaluationJob) -> list[Any]:
    if job.dataset is None:
        return []
    from mlflow.entities import Dataset, DatasetInput, InputTag

    version, source = job.dataset.version, json.dumps({"uri": job.dataset.manifest_uri})
    name = job.dataset.manifest_uri.rpartition("/manifests/")[0].rpartition("/")[2] or "dataset"
    use = "evaluation" if isinstance(job, EvaluationJob) else "training"
    dataset = Dataset(name=name, digest=version[:32], source_type="mxdist", source=source)
    return [DatasetInput(dataset, [InputTag("mlflow.data.context", use)])]
