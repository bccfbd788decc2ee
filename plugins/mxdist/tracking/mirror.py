"""The journal's copy in the run store: numbered chunks, written by one thread."""

from __future__ import annotations

from pathlib import Path

from mxdist.store import Attempt
from mxdist.tracking.journal import JournalReader, Record, line_of

CHUNK = 5000
"""Records in one chunk, at most."""


def restore(attempt: Attempt, path: Path) -> bool:
    """Make a local journal again from its copy, where a supervisor goes on on another host; return whether it did.

    :raises StoreError: the run store cannot be reached; nothing was made.
    """
    if path.exists() or not attempt.journal.last():
        return False
    lines = [line_of(Record.load(record).dump()) for _, chunk in attempt.journal.read() for record in chunk["records"]]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(b"".join(lines))
    partial.rename(path)
    return True


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
        last = self._chunks.last()
        for _, chunk in self._chunks.read(last - 1) if last else ():
            self.copied = max(self.copied, chunk["records"][-1]["n"])
        self._last_chunk = last
