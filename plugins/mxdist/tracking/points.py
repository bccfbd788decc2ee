"""From the journal's records to the points that MLflow gets: a pure function, the same whoever computes it.

After a restart, training goes on from its last checkpoint and repeats steps that were recorded already. A point counts
if its step lies above all that earlier sessions recorded for its key; so each step of each metric is one point,
whatever was killed in between, and a batch that is sent twice holds identical points, which MLflow keeps once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mxdist.store import Attempt
from mxdist.tracking.journal import Record
from mxdist.tracking.params import metric_key

NONFINITE_KEY = "nonfinite_steps"


@dataclass(frozen=True, slots=True)
class Point:
    """One point of one metric, and the record it came from."""

    attempt: int
    n: int
    key: str
    value: float
    step: int
    time_ms: int
    note: str = ""


class Sieve:
    """Keeps the records that count. Feed it every record of a training, in order, from its first attempt."""

    def __init__(self) -> None:
        self._floors: dict[str, int] = {}
        self._highest: dict[str, int] = {}
        self._session: tuple[int, int] | None = None
        self._nonfinite = 0

    def take(self, attempt: int, record: Record) -> Point | None:
        """Return the record's point, or None if an earlier session has recorded that step."""
        if self._session != (attempt, record.session):
            self._session = (attempt, record.session)
            self._floors |= self._highest
        floor = self._floors.get(record.key)
        if floor is not None and record.step <= floor:
            return None
        self._highest[record.key] = max(record.step, self._highest.get(record.key, record.step))
        if record.value is not None:
            return Point(attempt, record.n, metric_key(record.key), record.value, record.step, record.time_ms)
        self._nonfinite += 1
        note = f"{record.key} was {record.nonfinite} at step {record.step}"
        return Point(attempt, record.n, NONFINITE_KEY, float(self._nonfinite), record.step, record.time_ms, note)


def chain(attempt: Attempt) -> list[Attempt]:
    """Return the attempts of this training, from its origin to ``attempt``."""
    first = attempt.claim.origin
    earlier = [attempt.job.attempt(number) for number in range(first, attempt.number)]
    return [*(one for one in earlier if one.claim.origin == first), attempt]


def mirrored(attempt: Attempt) -> Iterator[Record]:
    """Yield the records that reached the run store."""
    last = 0
    for _, chunk in attempt.journal.read():
        for document in chunk["records"]:
            record = Record.load(document)
            if record.n > last:
                last = record.n
                yield record


def points(sieve: Sieve, attempt: int, records: Iterable[Record]) -> Iterator[Point]:
    """Yield the points of these records."""
    for record in records:
        if (point := sieve.take(attempt, record)) is not None:
            yield point
