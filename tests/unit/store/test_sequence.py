"""Chunks, compare-and-swap and leases, built from create-if-absent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mxdist.store import Chunks, Lease, Register, Store, Versioned


def test_chunks_are_read_in_order_and_written_once(store: Store) -> None:
    chunks = Chunks(store, "logs")
    assert chunks.last() == 0
    for number in (1, 2, 10, 9):
        assert chunks.append(number, {"n": number})
    assert not chunks.append(2, {"n": "another writer"})
    assert list(chunks.read(after=1)) == [(2, {"n": 2}), (9, {"n": 9}), (10, {"n": 10})]
    assert chunks.last() == 10


def test_counting_by_many_writers_loses_nothing(open_again: Callable[[], Store]) -> None:
    def add(_: int) -> None:
        register = Register(open_again(), "counter")
        while True:
            seen = register.read()
            if register.swap(seen, (seen.value or 0) + 1):
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert Register(open_again(), "counter").read() == Versioned(24, 24)


def test_a_value_that_returns_is_still_a_new_one(store: Store) -> None:
    register = Register(store, "champion")
    first = register.swap(register.read(), "A")
    assert first
    second = register.swap(first, "B")
    assert second
    register.swap(second, "A")
    assert register.swap(first, "C") is None
    assert register.read() == Versioned(3, "A")


def test_a_sleeper_cannot_write_a_pruned_number_again(store: Store) -> None:
    register = Register(store, "champion")
    asleep = register.read()
    seen = asleep
    for value in range(5):
        swapped = register.swap(seen, value)
        assert swapped
        seen = swapped
    register.prune(keep=1)
    assert register.swap(asleep, "stale") is None
    assert register.read() == Versioned(5, 4)


def test_a_lease_is_held_renewed_and_runs_out(open_again: Callable[[], Store]) -> None:
    mine, other = (Lease(open_again(), "lease", ttl_s=10) for _ in range(2))
    assert mine.acquire(now=100)
    assert not other.acquire(now=105)
    assert mine.acquire(now=108)
    assert not other.acquire(now=115)
    assert other.acquire(now=118.1)
    assert not mine.acquire(now=119)
    mine.release()
    assert not mine.acquire(now=120)
    other.release()
    assert mine.acquire(now=121)
