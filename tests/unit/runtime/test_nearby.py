"""Ranks of one host: what another rank opens must be what was offered, and who waits learns of who is gone."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mxdist import processes
from mxdist.runtime.parallel import Alone, nearby
from mxdist.runtime.parallel.nearby import Neighbour

SIZE = 1 << 16


class Threads(Alone):
    """Ranks as threads of this process, which sum what they exchange."""

    def __init__(self, rank: int, size: int, table: dict[int, NDArray[np.float64]], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size, self._table, self._barrier = rank, size, table, barrier

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        self._table[self.rank] = values
        self._barrier.wait(60)
        found: NDArray[np.float64] = np.sum([self._table[rank] for rank in range(self.size)], axis=0)
        self._barrier.wait(60)
        return found


def world(size: int, act: Callable[[Threads], Any]) -> list[Any]:
    """Return what ``act`` returns on each rank."""
    table: dict[int, NDArray[np.float64]] = {}
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, [Threads(rank, size, table, barrier) for rank in range(size)]))


def pair(waiting: nearby.Waiting = lambda rank: None) -> tuple[Neighbour, Neighbour]:
    """Return what two ranks have of each other."""
    first, second = world(2, lambda group: nearby.join(group, {1 - group.rank: SIZE}, waiting))
    return first[1], second[0]


def test_documents_of_all_ranks_are_collected() -> None:
    documents = world(3, lambda group: group.collect({"rank": group.rank, "name": "ü" * group.rank}))
    assert documents == [[{"rank": rank, "name": "ü" * rank} for rank in range(3)]] * 3


def test_each_writes_what_the_other_reads() -> None:
    first, second = pair()
    first.outbox[:3] = b"abc"
    second.outbox[:3] = b"xyz"
    first.tell(b"w")
    second.hear(b"w")
    assert (second.inbox[:3], first.inbox[:3]) == (b"abc", b"xyz")


def test_words_are_counted_by_kind() -> None:
    first, second = pair()
    for word in (b"r", b"w", b"w"):
        first.tell(word)
    for word in (b"w", b"w", b"r"):
        second.hear(word)
    assert not second._poll.poll(0)
    assert not second._heard.total()


def test_who_is_gone_is_named() -> None:
    first, second = pair()
    first.tell(b"w")
    first.close()
    second.hear(b"w")  # what it said before still counts
    with pytest.raises(ConnectionResetError, match="Connection closed by peer: rank 0 is gone"):
        second.hear(b"w")
    with pytest.raises(BrokenPipeError):
        second.tell(b"w")


def test_a_long_wait_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "_PATIENCE_S", 0.01)
    told: list[int] = []
    first, second = pair(told.append)
    timer = threading.Timer(0.3, first.tell, [b"w"])
    timer.start()
    second.hear(b"w")
    timer.join()
    assert told == [0]


def test_a_rank_on_another_host_is_not_near(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["one", "two"])
    monkeypatch.setattr(processes, "host_identity", lambda: next(names))
    monkeypatch.setattr(nearby, "create", lambda size: pytest.fail("nobody could take this"))
    assert world(2, lambda group: nearby.join(group, {1 - group.rank: SIZE})) == [{}, {}]


def test_nothing_stays_open_of_an_offer_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pipe", full)
    before = sorted(os.listdir("/proc/self/fd"))
    assert world(2, lambda group: nearby.join(group, {1 - group.rank: SIZE})) == [{}, {}]
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_another_one_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that were copied while they ran say that they are the same; then neither believes it."""
    take = nearby._take

    def wrong(document: Mapping[str, Any]) -> Any:
        return take({**document, "mark": "00" * nearby.MARK_BYTES})

    monkeypatch.setattr(nearby, "_take", wrong)
    before = len(os.listdir("/proc/self/fd"))
    assert world(2, lambda group: nearby.join(group, {1 - group.rank: SIZE})) == [{}, {}]
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for neighbour in pair():
        neighbour.close()
        neighbour.close()
        neighbour.inbox.close()
        neighbour.outbox.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_system_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert world(2, lambda group: nearby.join(group, {1 - group.rank: SIZE})) == [{}, {}]


def test_memory_is_opened_by_its_mark() -> None:
    first, second = nearby.create(SIZE), nearby.create(SIZE)
    memory = nearby.open_memory(nearby.place(first), SIZE, nearby.mark(first))
    memory[100] = 7
    assert os.pread(first, 1, 100) == b"\x07"
    with pytest.raises(ValueError, match="not the memory that was offered"):
        nearby.open_memory(nearby.place(second), SIZE, nearby.mark(first))
    with pytest.raises(ValueError, match=r"mmap length"):
        nearby.open_memory(nearby.place(second), 2 * SIZE, nearby.mark(second))
    for descriptor in (first, second):
        os.close(descriptor)
