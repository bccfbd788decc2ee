"""Which records become points."""

from __future__ import annotations

from mxdist.tracking.journal import Record
from mxdist.tracking.points import Sieve, points


def record(n: int, session: int, step: int, *, key: str = "loss", value: float | None = 1.0) -> Record:
    return Record(n, session, key, value, step, 1000 + n, nonfinite=None if value is not None else "nan")


def kept(sieve: Sieve, attempt: int, *records: Record) -> list[int]:
    return [point.n for point in points(sieve, attempt, records)]


def test_steps_repeated_after_a_restart_are_dropped() -> None:
    first = [record(n, 1, n) for n in range(1, 58)]
    again = [record(57 + n, 2, 50 + n) for n in range(1, 11)]
    assert kept(Sieve(), 1, *first, *again) == [*range(1, 58), *range(65, 68)]


def test_the_same_holds_over_attempts() -> None:
    sieve = Sieve()
    assert kept(sieve, 1, record(1, 1, 1), record(2, 1, 2)) == [1, 2]
    assert kept(sieve, 3, record(1, 1, 2), record(2, 1, 3)) == [2]


def test_within_a_session_any_order_is_kept() -> None:
    assert kept(Sieve(), 1, record(1, 1, 5), record(2, 1, 3), record(3, 1, 5)) == [1, 2, 3]


def test_each_metric_has_its_own_steps() -> None:
    sieve = Sieve()
    kept(sieve, 1, record(1, 1, 100))
    assert kept(sieve, 1, record(2, 2, 1, key="accuracy"), record(3, 2, 100)) == [2]


def test_a_value_that_is_not_finite_becomes_a_count() -> None:
    found = list(points(Sieve(), 1, [record(1, 1, 1, value=None), record(2, 1, 2), record(3, 1, 3, value=None)]))
    assert [(p.key, p.value, p.step) for p in found] == [
        ("nonfinite_steps", 1, 1),
        ("loss", 1.0, 2),
        ("nonfinite_steps", 2, 3),
    ]
    assert found[0].note == "loss was nan at step 1"


def test_a_name_that_mlflow_refuses_is_mended() -> None:
    (point,) = points(Sieve(), 1, [record(1, 1, 1, key="/top@5//test%" + "x" * 300)])
    assert point.key == "top_5_test_" + "x" * (250 - len("/top_5_test_"))
