"""What a job was when it last ran: what has changed since, and what it will probably cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mxdist.errors import MxdistError
from mxdist.launch.bundle import Bundle
from mxdist.spec import EvaluationJob, JobState, TrainingJob
from mxdist.store import Attempt, JobRun, Result, Store
from mxdist.store.run import INDEX

_MOST_KEYS = 500
_AT_ONCE = 16
_SHORT = 12
_ABSENT = "(none)"
_LONGEST = 60


@dataclass(frozen=True)
class LastRun:
    """The newest attempt under a job's name.

    :param result: how it ended; None while it has not.
    :param took_s: how long the newest one that succeeded took; None if none has.
    :param slots: ranks that it then had.
    """

    attempt: Attempt
    result: Result | None
    took_s: float | None = None
    slots: int = 0

    @property
    def named(self) -> str:
        """The attempt, for a reader."""
        return f"{self.attempt.claim.job_key} attempt {self.attempt.number}"


@dataclass(frozen=True)
class Change:
    """One difference: a field of the job by its path, or ``code``."""

    path: str
    before: str
    now: str


@dataclass(frozen=True)
class Cost:
    """An estimate.

    :param hours: how long the job is expected to take.
    :param basis: where that comes from.
    """

    slots: int
    hours: float
    price_per_slot_hour: float
    basis: str

    @property
    def total(self) -> float:
        """In the currency of the price."""
        return self.slots * self.hours * self.price_per_slot_hour

    def describe(self) -> str:
        """Return one line."""
        slots = f"{self.slots} slot{'s' if self.slots != 1 else ''}"
        return f"{self.total:.2f} = {slots} x {self.hours:.3g} h x {self.price_per_slot_hour:g}; {self.basis}"

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"total": self.total, "slots": self.slots, "hours": self.hours, "basis": self.basis}


def last_run(runs: Store, name: str) -> LastRun | None:
    """Return the newest run of a job of this name, whatever its key; None if there is none.

    In Airflow a job is named by its task, on the command line by its file.

    :raises StoreError: the run store does not answer.
    """
    keys = [entry.key.rpartition("/")[2] for entry in runs.list(f"{INDEX}/{name}")][-_MOST_KEYS:]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = [one for one in pool.map(lambda key: _latest(runs, key, name), keys) if one is not None]
    if not found:
        return None
    newest = max(found, key=lambda one: one.attempt.claim.submitted_at)
    good = [one for one in found if one.result is not None and one.result.state is JobState.SUCCEEDED]
    if not good:
        return newest
    timed = max(good, key=lambda one: one.attempt.claim.submitted_at)
    took_s = timed.result.duration_s if timed.result else None
    slots = int((timed.attempt.claim.job.get("parallelism") or {}).get("world_size", 1))
    return LastRun(newest.attempt, newest.result, took_s, slots)


def changes(last: LastRun, job: TrainingJob | EvaluationJob, bundle: Bundle) -> tuple[Change, ...]:
    """Return what is different now: fields of the job, the dataset's version among them, and code."""
    claim = last.attempt.claim
    try:
        before = claim.parsed().to_document()  # defaults of today's fields included
    except MxdistError:  # written by another version
        before = claim.job
    found = [*_differences(before, job.to_document())]
    if claim.user_code_digest and claim.user_code_digest != bundle.user_digest:
        found.append(Change("code (yours)", claim.user_code_digest[:_SHORT], bundle.user_digest[:_SHORT]))
    elif claim.code_digest and claim.code_digest != bundle.digest:
        found.append(Change("code (mxdist, settings)", claim.code_digest[:_SHORT], bundle.digest[:_SHORT]))
    return tuple(found)


def cost(job: TrainingJob | EvaluationJob, last: LastRun | None) -> Cost | None:
    """Return what the job will probably cost; None without a price, or when nothing says how long it takes."""
    price, slots = job.cluster.price_per_slot_hour, job.parallelism.world_size
    if price is None:
        return None
    if last is not None and last.took_s:
        then = "" if last.slots == slots else f", with {last.slots} slot{'s' if last.slots != 1 else ''} then"
        return Cost(slots, last.took_s / 3600, price, f"as long as the last run that succeeded{then}")
    if job.limits.deadline_s is not None:
        return Cost(slots, job.limits.deadline_s / 3600, price, "at most, for its deadline is all that is known")
    return None


def describe(last: LastRun, found: tuple[Change, ...]) -> list[str]:
    """Return the differences as lines for a reader."""
    when = datetime.fromtimestamp(last.attempt.claim.submitted_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    state = last.result.state.value if last.result else "not ended"
    took = f", {last.result.duration_s / 60:.1f} min" if last.result else ""
    lines = [f"since {last.named} ({when}, {state}{took})"]
    width = max((len(change.path) for change in found), default=0)
    lines += [f"  {change.path:<{width}}  {change.before} -> {change.now}" for change in found]
    return lines if found else [*lines, "  nothing has changed"]


def _latest(runs: Store, key: str, name: str) -> LastRun | None:
    try:
        attempt = JobRun(runs, key).latest()
        if attempt is None or attempt.claim.job.get("name") != name:
            return None
        return LastRun(attempt, attempt.result())
    except (MxdistError, TypeError, ValueError):  # claimed by nobody yet, removed, or not ours to read
        return None


def _differences(before: Any, now: Any, path: str = "") -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*now, *before]):
            inner = f"{path}.{name}" if path else str(name)
            yield from _differences(before.get(name), now.get(name), inner)
    elif before != now:
        yield Change(path, _told(before), _told(now))


def _told(value: Any) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef"):
        return value[:_SHORT]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
