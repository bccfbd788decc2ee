"""Chunks, compare-and-swap and leases, built from create-if-absent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mxdist.store import Chunks, Lease, Register, Store, Versioned
from mxdist.store.sequence import numbered


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


def test_a_lease_leaves_little_behind(store: Store) -> None:
    for _ in range(5):
        lease = Lease(store, "lease", ttl_s=10)
        assert lease.acquire()
        lease.release()
    assert [entry.key for entry in store.list("lease/")] == [numbered("lease", 9), numbered("lease", 10), "lease/floor"]


@pytest.mark.parametrize("floor", [8, 0], ids=["as pruned", "lowered by a slower prune"])
def test_a_sleeper_takes_no_lease_that_another_holds(store: Store, monkeypatch: pytest.MonkeyPatch, floor: int) -> None:
    other, asleep = (Lease(store, "lease", ttl_s=10) for _ in range(2))
    assert other.acquire()
    other.release()
    seen, read = Register(store, "lease").read(), Register.read
    for _ in range(4):
        assert other.acquire()
        other.release()
    assert other.acquire()
    store.write_json("lease/floor", floor)
    answers = iter([seen])
    monkeypatch.setattr(asleep._register, "read", lambda: next(answers, None) or read(asleep._register))
    assert not asleep.acquire()
    assert not asleep.acquire()
    assert other.acquire(), "still its own"


def test_a_lease_that_many_want_has_one_holder(open_again: Callable[[], Store]) -> None:
    inside = threading.Lock()

    def work(_: int) -> None:
        lease, give_up = Lease(open_again(), "lease", ttl_s=600), time.monotonic() + 120
        while not lease.acquire():
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert inside.acquire(blocking=False), "somebody else holds it"
        inside.release()
        lease.release()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))
