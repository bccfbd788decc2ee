"""The ranks' log files, mirrored into the run store line by line, within bounds.

Every rank writes to a file of its own; nothing reads it but this mirror, so a rank never waits for a reader. Lines
are numbered over the whole attempt. What is mirrored is bounded in rate and in sum, and every line in length: a
gap is marked by a line that tells how much is missing and where the full file lies. The end of each world always
comes through, for that is where the reason stands. Each chunk notes how far into the files it reaches, so that the
next supervisor goes on where a killed one stopped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxdist.store import Attempt

MAX_LINE_BYTES = 8 << 10
MAX_CHUNK_BYTES = 128 << 10
MAX_CHUNK_LINES = 500
BURST_BYTES = 1 << 20
RATE_BYTES_S = 64 << 10
TOTAL_BYTES = 32 << 20
END_BYTES = 64 << 10
"""Of every rank's last output, mirrored whatever the bounds say."""

_PENDING_BYTES = 4 << 20
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def clean(line: bytes) -> str:
    """Return a raw line as text that any terminal, JSON reader or browser takes.

    Of a line that was overwritten in place (a progress bar), the last state is kept.
    """
    shown = line.rstrip(b"\r\n").rpartition(b"\r")[2]
    return _CONTROL.sub("\ufffd", _ANSI.sub("", shown.decode("utf-8", errors="replace")))


@dataclass
class Tail:
    """New lines of one growing file, read in bounded memory.

    :param offset: how far the file has been read.
    """

    path: Path
    offset: int = 0
    _carry: bytes = b""
    _cutting: bool = False

    @property
    def line_offset(self) -> int:
        """Where the first line begins that was not returned yet."""
        return self.offset - len(self._carry)

    def waiting(self) -> int:
        """Return how many bytes wait to be read."""
        try:
            return max(0, self.path.stat().st_size - self.offset)
        except OSError:
            return 0

    def skip(self, count: int) -> None:
        """Leave out the next ``count`` bytes, and the rest of the line that they end in."""
        self.offset += count
        self._carry, self._cutting = b"", True

    def read(self, limit: int, *, final: bool = False) -> Iterator[tuple[str, int]]:
        """Yield ``(line, offset after it)`` of at most ``limit`` new bytes; ``final``: of a last unended line too."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(limit)
        except OSError:
            return
        position = self.line_offset
        self.offset += len(data)
        lines = (self._carry + data).split(b"\n")
        self._carry = lines.pop()
        for line in lines:
            position += len(line) + 1
            if self._cutting:
                self._cutting = False
            else:
                yield _bounded(line), position
        yield from self._rest(final)

    def _rest(self, final: bool) -> Iterator[tuple[str, int]]:
        long = len(self._carry) > MAX_LINE_BYTES
        if not self._carry or not (long or final):
            return
        line, self._carry = self._carry, b""
        if not self._cutting:
            self._cutting = not final
            yield _bounded(line), self.offset


def _bounded(line: bytes) -> str:
    if len(line) <= MAX_LINE_BYTES:
        return clean(line)
    return f"{clean(line[:MAX_LINE_BYTES])} ... [the line goes on]"


@dataclass
class Budget:
    """How much may be mirrored: a bucket that fills at a steady rate, and a sum that never grows."""

    allowed: float = BURST_BYTES
    left: int = TOTAL_BYTES
    _at: float = field(default_factory=time.monotonic)

    def now(self) -> int:
        """Return how many bytes may be mirrored now."""
        moment = time.monotonic()
        self.allowed = min(BURST_BYTES, self.allowed + (moment - self._at) * RATE_BYTES_S)
        self._at = moment
        return int(min(self.allowed, self.left))

    def spend(self, count: int) -> None:
        """Note that ``count`` bytes were mirrored."""
        self.allowed -= count
        self.left -= count


@dataclass(frozen=True)
class _Position:
    """How far the log files of one world are mirrored."""

    world: int
    offsets: list[int]

    def after(self, line: _Line) -> _Position:
        """Return the position once ``line`` is mirrored too."""
        if line.index is None:
            return self
        offsets = list(self.offsets) if line.world == self.world else []
        offsets += [0] * (line.index + 1 - len(offsets))
        offsets[line.index] = line.offset
        return _Position(line.world, offsets)


@dataclass(frozen=True)
class _Line:
    text: str
    world: int
    index: int | None
    offset: int


class LogMirror:
    """The one writer of an attempt's log chunks.

    :param folder: the attempt's scratch folder.
    """

    def __init__(self, attempt: Attempt, folder: Path) -> None:
        self._attempt = attempt
        self._folder = folder
        self._budget = Budget()
        self._pending: list[_Line] = []
        self._pending_bytes = 0
        self._world = 0
        self._tails: list[Tail] = []
        self._written = _Position(0, [])
        self._next, self._line = 1, 1
        # Noted now: a world that starts before `resume` runs is not left behind, and must not be read twice.
        self._left_behind = sorted(int(path.name.partition("-")[2]) for path in folder.glob("world-*"))

    @property
    def line_count(self) -> int:
        """Number of lines in the run store."""
        return self._line - 1

    def resume(self) -> None:
        """Take over where the last writer of this attempt stopped, and pick up what it left behind.

        :raises StoreError: the run store does not answer.
        """
        last = self._attempt.logs.last()
        for number, chunk in self._attempt.logs.read(after=last - 1) if last else ():
            self._next, self._line = number + 1, chunk["first"] + len(chunk["lines"])
            self._written = _Position(**chunk["at"])
            self._follow(self._written.world, self._written.offsets)
        for world in self._left_behind:
            if world > self._world:
                self._follow(world, [])
            if world == self._world:
                self.collect(final=True)

    def follow(self, world: int, ranks: int) -> None:
        """Turn to the logs of a new world; those of the last one must have been collected to their end."""
        self._follow(world, [0] * ranks)

    def note(self, text: str) -> None:
        """Add a line of the supervisor's own."""
        self._add(f"[mxdist] {clean(text.encode())}", None, 0)

    def collect(self, *, final: bool = False) -> None:
        """Read what the ranks have written since; ``final``: they are dead, take the end of each in any case."""
        if self._pending_bytes > _PENDING_BYTES and not final:
            return
        for index, tail in enumerate(self._tails):
            waiting = tail.waiting()
            if waiting == 0 and not final:
                continue
            limit = self._budget.now() // len(self._tails)
            limit = max(limit, END_BYTES) if final else limit
            if waiting > limit:
                self._gap(index, tail, waiting - limit)
            before = tail.offset
            for text, offset in tail.read(limit, final=final):
                self._add(f"[{_label(tail)}] {text}", index, offset)
            self._budget.spend(tail.offset - before)

    def flush(self) -> None:
        """Write everything collected as chunks.

        :raises StoreError: the run store does not answer; what was not written stays pending.
        """
        while self._pending:
            count, chunk = self._build()
            if not self._attempt.logs.append(self._next, chunk):  # another writer was here: go on behind it
                self._next = self._attempt.logs.last()
                for _, other in self._attempt.logs.read(after=self._next - 1):
                    self._line = other["first"] + len(other["lines"])
                self._next += 1
                continue
            self._next, self._line = self._next + 1, self._line + count
            self._written = _Position(**chunk["at"])
            self._pending_bytes -= sum(len(line.text) for line in self._pending[:count])
            del self._pending[:count]

    def _follow(self, world: int, offsets: list[int]) -> None:
        self._world = world
        paths = _log_files(self._folder / f"world-{world}", len(offsets))
        self._tails = [Tail(path, offsets[index] if index < len(offsets) else 0) for index, path in enumerate(paths)]

    def _gap(self, index: int, tail: Tail, count: int) -> None:
        tail.skip(count)
        told = f"[{_label(tail)}] ... {count:,} bytes left out here; the full log is {tail.path}"
        self._add(told, index, tail.offset)

    def _add(self, text: str, index: int | None, offset: int) -> None:
        self._pending.append(_Line(text, self._world, index, offset))
        self._pending_bytes += len(text)

    def _build(self) -> tuple[int, dict[str, Any]]:
        lines: list[str] = []
        size, position = 0, self._written
        for line in self._pending:
            size += len(line.text)
            if lines and (len(lines) == MAX_CHUNK_LINES or size > MAX_CHUNK_BYTES):
                break
            lines.append(line.text)
            position = position.after(line)
        return len(lines), {"first": self._line, "lines": lines, "at": asdict(position)}


def _log_files(folder: Path, least: int) -> list[Path]:
    """Return the log files of a world in a fixed order: the ranks', then those of other roles.

    :param least: how many there are known to be, also when they are gone.
    """
    found = {path.stem for path in folder.glob("*.log")}
    ranks = sum(stem.startswith("rank-") for stem in found)
    roles = sorted((stem for stem in found if not stem.startswith("rank-")), key=lambda stem: (len(stem), stem))
    names = [*(f"rank-{rank}" for rank in range(ranks)), *roles]
    names += [f"rank-{rank}" for rank in range(len(names), least)]
    return [folder / f"{name}.log" for name in names]


def _label(tail: Tail) -> str:
    """Return how lines of a file are marked: a rank by its number, other roles by name."""
    return tail.path.stem.removeprefix("rank-").replace("-", " ")
