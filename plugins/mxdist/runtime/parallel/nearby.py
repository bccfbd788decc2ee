"""Ranks of one host: memory that both map, and how one wakes the other.

Horovod carries a message out at the next turn of a thread of its own, which has to talk to all ranks first and shares
the core with the computation. Between ranks of one host neither is needed: one writes into memory that the other maps,
and wakes it through a pipe.

Memory and pipes have no name in any file system: the other rank opens them through ``/proc``, and they are gone with
the last rank that has them. A word in the memory tells whether it is the right one: hosts that were copied while they
ran say that they are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import select
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mxdist import processes
from mxdist.runtime.parallel.base import Group

MARK_BYTES = 32
_PATIENCE_S = 1.0

Waiting = Callable[[int], None]
"""Called with the rank that this one has been waiting for, once it takes long."""


class Neighbour:
    """Another rank of this host.

    :param inbox: memory that it writes and this rank reads.
    :param outbox: memory that this rank writes and it reads.
    :param bell: the end of a pipe that its words come out of.
    :param rope: the end of a pipe that words for it go into.
    """

    def __init__(
        self, rank: int, inbox: mmap.mmap, outbox: mmap.mmap, bell: int, rope: int, waiting: Waiting = lambda rank: None
    ) -> None:
        self.rank, self.inbox, self.outbox = rank, inbox, outbox
        self._bell, self._rope, self._waiting = bell, rope, waiting
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)
        self._heard: Counter[int] = Counter()
        self._open = [bell, rope]

    def tell(self, word: bytes) -> None:
        """Wake it with a word of one byte.

        :raises BrokenPipeError: it is gone.
        """
        os.write(self._rope, word)

    def hear(self, word: bytes) -> None:
        """Wait until it has said a word once more than was heard of it.

        :raises ConnectionResetError: it is gone.
        """
        kind = word[0]
        while not self._heard[kind]:
            if not self._poll.poll(_PATIENCE_S * 1000):
                self._waiting(self.rank)
            said = os.read(self._bell, 4096)
            if not said:
                raise ConnectionResetError(f"Connection closed by peer: rank {self.rank} is gone")
            self._heard.update(said)
        self._heard[kind] -= 1

    def close(self) -> None:
        """Have nothing to do with it any more; it learns of that when it waits. Closing twice does nothing."""
        while self._open:
            os.close(self._open.pop())


def join(group: Group, sizes: Mapping[int, int], waiting: Waiting = lambda rank: None) -> dict[int, Neighbour]:
    """Return those of some ranks that are on this host; every rank of the world must call it.

    :param sizes: the ranks, and how many bytes each must be able to write for this one; they must name this one too.
    """
    hosts = group.collect(this_host().hex())
    here = {rank: size for rank, size in sizes.items() if hosts[rank] == hosts[group.rank]}
    made = {rank: offer for rank, size in here.items() if (offer := _offer(size)) is not None}
    offers = group.collect({str(rank): offer.document for rank, offer in made.items()})
    taken: dict[int, tuple[mmap.mmap, int]] = {}
    for rank in made:
        theirs = offers[rank].get(str(group.rank))
        if theirs is not None:
            with contextlib.suppress(OSError, ValueError):
                taken[rank] = _take(theirs)
    both = group.collect(sorted(taken))
    found = {}
    for rank, offer in made.items():
        if rank in taken and group.rank in both[rank]:
            found[rank] = Neighbour(rank, offer.memory, taken[rank][0], offer.bell, taken[rank][1], waiting)
        else:
            os.close(offer.bell)
            if rank in taken:
                os.close(taken[rank][1])
        offer.close()
    return found


def this_host() -> bytes:
    """Return 32 bytes that are the same for all ranks of this host, and for no others."""
    return hashlib.sha256(processes.host_identity().encode()).digest()


class _Offer:
    """Memory and a pipe that this rank has made for another, open until that one has taken them."""

    def __init__(self, size: int) -> None:
        self._descriptor, self._size = create(size), size
        try:
            self.memory = mmap.mmap(self._descriptor, size)
            self._mark = mark(self._descriptor)
            self.bell, self._rope = os.pipe()
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def document(self) -> dict[str, Any]:
        """What the other must know."""
        own = {"size": self._size, "mark": self._mark, "rope": place(self._rope)}
        return own | {"memory": place(self._descriptor)}

    def close(self) -> None:
        """Close what the other has taken or never will; without this, nobody would learn that it is gone."""
        os.close(self._descriptor)
        os.close(self._rope)


def _offer(size: int) -> _Offer | None:
    try:
        return _Offer(max(size, MARK_BYTES))
    except OSError:
        return None


def _take(document: Mapping[str, Any]) -> tuple[mmap.mmap, int]:
    memory = open_memory(document["memory"], document["size"], document["mark"])
    return memory, os.open(document["rope"], os.O_WRONLY | os.O_CLOEXEC)


def create(size: int) -> int:
    """Return memory without a name, all of it reserved.

    :raises OSError: there is not so much, or the system forbids it.
    """
    descriptor = os.memfd_create("mxdist", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def place(descriptor: int) -> str:
    """Return where other processes of this host find what this one has open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def mark(descriptor: int) -> str:
    """Write a word into memory by which the other ranks know it; whatever is written there later replaces it."""
    word = secrets.token_bytes(MARK_BYTES)
    os.pwrite(descriptor, word, 0)
    return word.hex()


def open_memory(where: str, size: int, word: str) -> mmap.mmap:
    """Return the memory at a place.

    :raises OSError: it cannot be opened.
    :raises ValueError: it is another.
    """
    opened = os.open(where, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(opened, size)
    finally:
        os.close(opened)
    if memory[:MARK_BYTES] != bytes.fromhex(word):
        raise ValueError("it is not the memory that was offered")
    return memory
