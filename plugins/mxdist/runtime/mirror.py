"""What an agent's ranks write, told to the supervisor: small files when they change, logs and the journal as they grow.

So the supervisor's own folder looks as if every rank were beside it. What is sent at once is bounded, so that a rank
that writes without end cannot hold up a beat; a log that is too far behind at the end of its world loses its middle,
and says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mxdist.runtime.place import JOURNAL, Place
from mxdist.runtime.wire import pack, say

PIECE_BYTES = 256 << 10
END_BYTES = 16 << 20
"""Of every log, sent at the end of a world whatever its length."""

_SMALL = ("rank-*.beat.json", "rank-*.result.json", "rank-*.place.json", "progress.json")
_SMALL_BYTES = 1 << 20


@dataclass
class Mirror:
    """One world's files, as far as they have been told.

    :param journal_at: how far the journal has been told already.
    """

    place: Place
    number: int
    journal_at: int = 0
    _offsets: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def changes(self, *, final: bool = False) -> Iterator[bytes]:
        """Yield lines for what is new; ``final``: everything that is left, for nobody writes any more."""
        folder = self.place.world(self.number)
        logs = sorted(folder.glob("*.log"))
        for path in logs:
            yield from self._grown(path, self.number, final)
        yield from self._grown(self.place.folder / JOURNAL, 0, final)
        for pattern in _SMALL:  # after the logs: who reads a result finds the words before it
            for path in sorted(folder.glob(pattern)):
                yield from self._changed(path)

    def _grown(self, path: Path, world: int, final: bool) -> Iterator[bytes]:
        is_log = path.name != JOURNAL
        at = self._offsets.get(path.name, 0) if is_log else self.journal_at
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if final and is_log and size - at > END_BYTES:
                    left_out = size - at - END_BYTES
                    at += left_out
                    told = f"\n... {left_out:,} bytes left out here; the full log was {path} on its host\n"
                    yield say("append", world=world, name=path.name, data=pack(told.encode()))
                file.seek(at)
                while data := file.read(PIECE_BYTES):
                    at += len(data)
                    yield say("append", world=world, name=path.name, data=pack(data))
                    if not final:
                        break
        except OSError:
            return
        finally:
            if is_log:
                self._offsets[path.name] = at
            else:
                self.journal_at = at

    def _changed(self, path: Path) -> Iterator[bytes]:
        try:
            found = path.stat()
            signature = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self._seen.get(path.name) == signature or found.st_size > _SMALL_BYTES:
                return
            data = path.read_bytes()
        except OSError:
            return
        self._seen[path.name] = signature
        yield say("file", world=self.number, name=path.name, data=pack(data))
