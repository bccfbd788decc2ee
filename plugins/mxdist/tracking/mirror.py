"""The journal's copy in the run store: numbered chunks, written by one thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from mxdist.store import Attempt, Chunks
from mxdist.tracking.journal import JournalReader, Record, line_of
from mxdist.tracking.points import mirrored

log = logging.getLogger(__name__)

CHUNK = 5000
"""Records in one chunk, at most."""


def restore(attempt: Attempt, path: Path) -> bool:
    """Make a local journal whole again from its copy, before anybody writes to it; return whether that was needed.

    A supervisor that goes on on another host has none; after a power loss its end may be missing, or any part of it.
    Where the disk takes no copy, the journal stays as it is: the run store has what it lacks.

    :raises StoreError: the run store cannot be reached; nothing was changed.
    """
    copied = _end_of(attempt.journal)[1]
    if not copied or _unbroken(_records(path)) >= copied:
        return False
    records = chain(mirrored(attempt), (record for record in _records(path) if record.n > copied))
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(line_of(record.dump()) for record in records)
        partial.rename(path)
    except OSError as error:
        log.warning("the journal %s cannot be made whole: %s", path, error)
        with suppress(OSError):
            partial.unlink()
        return False
    return True


def _records(path: Path) -> Iterator[Record]:
    reader = JournalReader(path)
    while records := reader.read(CHUNK):
        yield from records


def _end_of(chunks: Chunks) -> tuple[int, int]:
    """Return the numbers of the last chunk of the copy and of the last record in it, 0 when there is none."""
    last = chunks.last()
    found = chunks.read(last - 1) if last else ()
    return last, max((chunk["records"][-1]["n"] for _, chunk in found), default=0)


def _unbroken(records: Iterable[Record]) -> int:
    """Return the number of the last record before the first that is missing."""
    last = 0
    for record in records:
        if record.n > last + 1:
            break
        last = max(last, record.n)
    return last


class Mirror:
    """Copies a local journal into an attempt's chunks; goes on where an earlier supervisor stopped."""

    def __init__(self, attempt: Attempt, path: Path) -> None:
        self._chunks = attempt.journal
        self._reader = JournalReader(path)
        self._pending: list[Record] = []
        self._last_chunk: int | None = None
        self.copied = 0

    def catch_up(self) -> None:
        """Copy all that is new.

        :raises StoreError: the run store cannot be reached; the next call goes on.
        """
        if self._last_chunk is None:
            self._find_place()
        while records := self._next():
            chunk = {"first": records[0].n, "records": [record.dump() for record in records]}
            if self._chunks.append((self._last_chunk or 0) + 1, chunk):
                self._last_chunk = (self._last_chunk or 0) + 1
                self.copied = records[-1].n
                self._pending = []
            else:  # another supervisor of this attempt is, or was, faster
                self._find_place()

    def _next(self) -> list[Record]:
        if not self._pending:
            self._pending = self._reader.read(CHUNK)
        while self._pending and self._pending[-1].n <= self.copied:
            self._pending = self._reader.read(CHUNK)
        self._pending = [record for record in self._pending if record.n > self.copied]
        return self._pending

    def _find_place(self) -> None:
        self._last_chunk, copied = _end_of(self._chunks)
        self.copied = max(self.copied, copied)
