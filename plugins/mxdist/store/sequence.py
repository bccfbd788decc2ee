"""Numbered things under one prefix, built from create-if-absent alone.

Chunks are appended and read in order. A register is a document whose every value is a new number, so that a writer
that saw number 7 and creates number 8 has compared and swapped in one request: two cannot both create 8. A floor
document keeps a writer that slept through a pruning from creating an old number again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mxdist.errors import NotFound, StoreError
from mxdist.store.base import Store

WIDTH = 10
_KEPT = 2  # numbers of a lease: its last holder, and that it was given back


def numbered(prefix: str, number: int) -> str:
    """Return the key of one numbered document; keys sort as numbers do."""
    return f"{prefix}/{number:0{WIDTH}d}.json"


class Chunks:
    """Numbered, append-only JSON documents under ``prefix``; one writer, any number of readers."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def append(self, number: int, value: object) -> bool:
        """Create chunk ``number`` (from 1); return False if it is there already."""
        return self._store.create_json(numbered(self._prefix, number), value)

    def read(self, after: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield ``(number, value)`` of every chunk after ``after``, in order."""
        start = numbered(self._prefix, after) if after else ""
        for entry in self._store.list(f"{self._prefix}/", after=start):
            number = entry.key.rpartition("/")[2].removesuffix(".json")
            if number.isdigit():
                yield int(number), self._store.read_json(entry.key)

    def last(self) -> int:
        """Return the highest number, 0 when there is none."""
        numbers = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in self._store.list(f"{self._prefix}/")]
        return max((int(number) for number in numbers if number.isdigit()), default=0)


@dataclass(frozen=True)
class Versioned:
    """A register's value and its number; number 0 says that nothing was ever written."""

    number: int
    value: Any


class Register:
    """One JSON document with compare-and-swap."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._floor_key = f"{prefix}/floor"

    def read(self) -> Versioned:
        """Return the newest value."""
        while True:
            newest = max(
                (entry.key for entry in self._store.list(f"{self._prefix}/") if entry.key.endswith(".json")), default=""
            )
            if not newest:
                return Versioned(0, None)
            try:
                return Versioned(int(newest[-WIDTH - 5 : -5]), self._store.read_json(newest)["value"])
            except NotFound:  # pruned between the two requests: a newer one exists
                continue

    def swap(self, seen: Versioned, value: object) -> Versioned | None:
        """Write ``value`` if ``seen`` is still the newest; return None if somebody was faster."""
        number = seen.number + 1
        if number <= self._floor():
            return None
        wrapped = {"token": uuid.uuid4().hex, "value": value}
        if not self._store.create_json(numbered(self._prefix, number), wrapped):
            return None
        return Versioned(number, value) if number > self._floor() else None

    def prune(self, keep: int) -> None:
        """Delete all but the newest ``keep`` numbers; the floor is raised first."""
        newest = self.read().number
        floor = newest - keep
        if floor <= self._floor():
            return
        self._store.write_json(self._floor_key, floor)
        old = [entry.key for entry in self._store.list(f"{self._prefix}/") if entry.key.endswith(".json")]
        self._store.delete([key for key in old if int(key[-WIDTH - 5 : -5]) <= floor])

    def _floor(self) -> int:
        try:
            return int(self._store.read_json(self._floor_key))
        except NotFound:
            return 0


class Lease:
    """A lock that ends by the clock. It saves work; safety must come from fencing tokens.

    :param ttl_s: seconds after which a lease that was not renewed may be taken by another.
    """

    def __init__(self, store: Store, prefix: str, *, ttl_s: float) -> None:
        self._register = Register(store, prefix)
        self._ttl_s = ttl_s
        self._owner = uuid.uuid4().hex

    def acquire(self, *, now: float | None = None) -> bool:
        """Take or renew the lease; return False while another holds it."""
        now = time.time() if now is None else now
        seen = self._register.read()
        held = seen.value or {"owner": None, "until": 0.0}
        if held["owner"] not in (None, self._owner) and held["until"] > now:
            return False
        taken = self._register.swap(seen, {"owner": self._owner, "until": now + self._ttl_s})
        # Of two who prune at once the slower may lower the floor again, and let a sleeper write a pruned number.
        return taken is not None and self._register.read().number == taken.number

    def release(self) -> None:
        """Give the lease back if it is ours, and delete what is left of earlier holders."""
        seen = self._register.read()
        if seen.value and seen.value["owner"] == self._owner:
            self._register.swap(seen, {"owner": None, "until": 0.0})
            with suppress(StoreError):  # the next release deletes it as well
                self._register.prune(keep=_KEPT)
