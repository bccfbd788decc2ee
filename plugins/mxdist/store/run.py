"""One job's prefix in the run store: its attempts, and who may still write.

::

    <runs>/_jobs/<job key>              that there is such a job
    <runs>/<job key>/
        attempts/0000000001.json        Claim: token, job, when, where to resume; created once, never changed
        0000000001/
            supervisors/0000000001.json one per supervisor started: pid, host, start time
            state.json                  State: heartbeat, progress, last metrics (replaced all the time)
            logs/0000000001.json        {"first": line number, "lines": [...]}
            journal/0000000001.json     {"first": record number, "records": [...]}
            checkpoints/...             owned by runtime/checkpoint.py
            model/...                   the exported model, manifest last
            cancel.json                 the cancel intent, created once
            given_up.json               nobody goes on with a preempted training, created once
            tracking.json               MLflow run id and what was sent
            result.json                 Result, created once, before the supervisor exits
            handed_over.json            the result was returned to whoever asked for the job

The attempt number is the fencing token: an attempt may write as long as no higher one has been claimed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from mxdist.errors import Fenced, NotFound, StoreError
from mxdist.spec import EvaluationJob, JobState, TrainingJob, parse_job
from mxdist.store.base import Store
from mxdist.store.sequence import WIDTH, Chunks, numbered

INDEX = "_jobs"
"""Where the run store lists its job keys; no job key starts with an underscore."""

UNMOUNTED = "If it is on a share, is that mounted?"
"""What to ask about a run store that looks unmounted."""


class _Document:
    """A dataclass that is read from JSON written by an older or newer mxdist: unknown keys are dropped."""

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        known = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        return cls(**{key: value for key, value in document.items() if key in known})

    def dump(self) -> dict[str, Any]:
        document: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return document


@dataclass(frozen=True)
class Claim(_Document):
    """What an attempt is: written once, before anything starts.

    :param origin: the attempt at which this training began from scratch; the same for all that resume it.
    :param deadline_at: Unix time at which the attempt ends, or None.
    :param code_digest: SHA-256 over all code: mxdist's own and the user's.
    :param user_code_digest: SHA-256 over the user's own code; empty if it is not known.
    :param source: who asked: Airflow's dag, run, task, try and URL, or the command line's user and host.
    :param note: what the job's log should say first, such as why nothing is resumed.
    """

    number: int
    token: str
    job: dict[str, Any]
    job_key: str
    origin: int
    submitted_at: float
    deadline_at: float | None = None
    code_digest: str = ""
    user_code_digest: str = ""
    source: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def training_id(self) -> str:
        """The key of the one MLflow run of this training, over all attempts that resume it."""
        return f"{self.job_key}#{self.origin}"

    def parsed(self) -> TrainingJob | EvaluationJob:
        """Return the job as a spec."""
        return parse_job(self.job, stored=True)


@dataclass(frozen=True)
class Cause(_Document):
    """Why an attempt ended badly.

    :param kind: rank_exit, stall, start_timeout, deadline, cancel, preempted, nonfinite, user_error, data, host, lost
        or internal.
    """

    kind: str
    message: str
    retryable: bool = True
    rank: int | None = None
    host: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class State(_Document):
    """What is known of a living attempt. Times are Unix seconds, steps count optimizer updates.

    :param world: how many worlds were started (1 = no restart yet), over all supervisors of the attempt.
    :param ranks: per rank: pid, host, local_rank, step, exit_code.
    """

    state: JobState = JobState.SUBMITTED
    heartbeat: float = 0.0
    message: str = ""
    world: int = 0
    epoch: int = 0
    epochs: int = 0
    step: int = 0
    steps: int = 0
    samples_per_s: float | None = None
    eta_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    log_lines: int = 0
    mlflow_run_id: str | None = None
    mlflow_run_url: str | None = None

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        loaded = super().load(document)
        return cls(**{**asdict(loaded), "state": JobState(loaded.state)})


@dataclass(frozen=True)
class Result(_Document):
    """How an attempt ended; created once.

    :param metrics: final values only, a few; everything else is in MLflow and in the journal.
    :param model_uri: the exported model's folder in the run store, if there is one.
    :param model_digest: SHA-256 over the model's files.
    :param outputs: what an evaluation or a script hands back; small.
    :param tracking_complete: everything in the journal, and the model, reached MLflow.
    :param tracking_error: why not, as far as was known then.
    """

    state: JobState
    ended_at: float
    cause: Cause | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    model_uri: str | None = None
    model_digest: str | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    restarts: int = 0
    duration_s: float = 0.0
    samples_per_s: float | None = None
    log_uri: str | None = None
    mlflow_run_id: str | None = None
    mlflow_run_url: str | None = None
    registered_version: str | None = None
    tracking_complete: bool = True
    tracking_error: str | None = None

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        loaded = dict(document)
        loaded["state"] = JobState(loaded["state"])
        if loaded.get("cause"):
            loaded["cause"] = Cause.load(loaded["cause"])
        return super().load(loaded)


@dataclass(frozen=True)
class CancelIntent(_Document):
    """Somebody wants the attempt to end.

    :param by: user, airflow, deadline, cli, reconciler.
    :param marked_success: the user marked the Airflow task successful while it ran.
    """

    by: str
    reason: str
    at: float
    marked_success: bool = False


class Attempt:
    """One attempt's folder in the run store."""

    def __init__(self, job: JobRun, claim: Claim) -> None:
        self.job = job
        self.claim = claim
        self.number = claim.number
        self.store = job.store.child(f"{claim.number:0{WIDTH}d}")
        self.logs = Chunks(self.store, "logs")
        self.journal = Chunks(self.store, "journal")
        self.supervisors = Chunks(self.store, "supervisors")

    def check_fence(self) -> None:
        """Make sure that this attempt may still write.

        :raises Fenced: a newer attempt has been claimed.
        """
        if self.job.store.exists(numbered("attempts", self.number + 1)):
            raise Fenced(
                f"attempt {self.number} of {self.claim.job_key} was replaced by a newer one",
                hint="Nothing to do: the newer attempt is the one that counts.",
            )

    def read_state(self) -> State:
        """Return the last state written; a fresh one says SUBMITTED."""
        try:
            return State.load(self.store.read_json("state.json"))
        except NotFound:
            self.job.attempt(self.number)  # a store that lacks this very attempt says nothing
            return State()

    def write_state(self, state: State) -> None:
        """Replace the state."""
        self.store.write_json("state.json", state.dump())

    def result(self) -> Result | None:
        """Return how the attempt ended, or None while it has not."""
        document = self._maybe("result.json")
        return None if document is None else Result.load(document)

    def finish(self, result: Result) -> Result:
        """Record how the attempt ended, once; return the result that counts (an earlier one wins)."""
        self.store.create_json("result.json", result.dump())
        return Result.load(self.store.read_json("result.json"))

    def cancel_intent(self) -> CancelIntent | None:
        """Return the cancel intent, or None."""
        document = self._maybe("cancel.json")
        return None if document is None else CancelIntent.load(document)

    def request_cancel(self, by: str, reason: str, *, marked_success: bool = False) -> CancelIntent:
        """Write the cancel intent, once; return the one that counts."""
        self.store.create_json("cancel.json", CancelIntent(by, reason, time.time(), marked_success).dump())
        return CancelIntent.load(self.store.read_json("cancel.json"))

    def give_up(self, by: str, reason: str, *, marked_success: bool = False) -> None:
        """Note, once, that nobody goes on with this preempted attempt. One that is claimed later resumes it."""
        self.store.create_json("given_up.json", CancelIntent(by, reason, time.time(), marked_success).dump())

    def given_up(self) -> CancelIntent | None:
        """Return who gave the preempted attempt up and why, or None."""
        document = self._maybe("given_up.json")
        return None if document is None else CancelIntent.load(document)

    def hand_over(self) -> None:
        """Note that the result was returned to whoever asked for the job."""
        self.store.create_json("handed_over.json", {"at": time.time()})

    def handed_over(self) -> bool:
        """Return whether the result has been returned."""
        return self.store.exists("handed_over.json")

    def _maybe(self, key: str) -> Any:
        try:
            return self.store.read_json(key)
        except NotFound:
            return None


class JobRun:
    """One job's prefix: every attempt that was ever made at it.

    :param runs: the store of all jobs.
    :param job_key: ``store/run.py`` never invents one: see ``launch/client.py``.
    """

    def __init__(self, runs: Store, job_key: str) -> None:
        self.job_key = job_key
        self.runs = runs
        self.store = runs.child(job_key)

    def attempt(self, number: int) -> Attempt:
        """Return attempt ``number``.

        :raises NotFound: it was never claimed.
        :raises StoreError: the run store holds no job at all, as where a share was unmounted.
        """
        try:
            return Attempt(self, Claim.load(self.store.read_json(numbered("attempts", number))))
        except NotFound:
            if looks_unmounted(self.runs) and not Chunks(self.store, "attempts").last():
                raise StoreError(f"{self.runs.uri} holds no job, not even {self.job_key}.", hint=UNMOUNTED) from None
            raise

    def latest(self) -> Attempt | None:
        """Return the attempt that counts, or None if there never was one."""
        number = Chunks(self.store, "attempts").last()
        return self.attempt(number) if number else None

    def claim(
        self,
        job: TrainingJob | EvaluationJob,
        *,
        after: int,
        origin: int | None = None,
        code_digest: str = "",
        user_code_digest: str = "",
        source: Mapping[str, str] | None = None,
        note: str = "",
    ) -> Attempt:
        """Claim attempt ``after + 1``, which fences out attempt ``after``; whoever comes second gets the winner's.

        :param origin: the attempt whose training goes on, or None to begin from scratch.
        """
        number, now = after + 1, time.time()
        deadline_s = job.limits.deadline_s
        claim = Claim(
            number=number,
            token=uuid.uuid4().hex,
            job=job.to_document(),
            job_key=self.job_key,
            origin=number if origin is None else origin,
            submitted_at=now,
            deadline_at=None if deadline_s is None else now + deadline_s,
            code_digest=code_digest,
            user_code_digest=user_code_digest,
            source=dict(source or {}),
            note=note,
        )
        self.store.create_json(numbered("attempts", number), claim.dump())
        return self.attempt(number)


def job_keys(runs: Store) -> list[str]:
    """Return the keys of all jobs that were submitted to a run store."""
    return [entry.key.rpartition("/")[2] for entry in runs.list(f"{INDEX}/")]


def looks_unmounted(runs: Store) -> bool:
    """Return whether a run store without any job may be a folder where a share is not mounted."""
    return runs.may_vanish and not job_keys(runs)
