"""The journal: every metric, in order, as JSON lines on the local disk of rank 0.

One line a record: ``{"n": 1, "session": 1, "key": "loss", "value": 0.5, "step": 12, "time_ms": 1700000000000}``. A
session is the life of one writer: after a restart of the world the next writer begins a new one, and whatever steps it
repeats can be told from those that the earlier session wrote.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

log = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Record:
    """One value of one metric.

    :param n: position in the journal, from 1, without gaps.
    :param session: which writer wrote it, from 1.
    :param value: None when it is not finite; ``nonfinite`` then says nan, inf or -inf.
    """

    n: int
    session: int
    key: str
    value: float | None
    step: int
    time_ms: int
    epoch: int | None = None
    nonfinite: str | None = None

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        """Return the record of one line or one element of a chunk."""
        get = document.get
        return cls(
            int(document["n"]), int(get("session", 1)), str(document["key"]), document["value"], int(document["step"]),
            int(document["time_ms"]), get("epoch"), get("nonfinite"),
        )  # fmt: skip

    def dump(self) -> dict[str, Any]:
        """Return plain JSON values; what is not known is left out."""
        document: dict[str, Any] = {"n": self.n, "session": self.session, "key": self.key, "value": self.value}
        document |= {"step": self.step, "time_ms": self.time_ms}
        if self.epoch is not None:
            document["epoch"] = self.epoch
        if self.nonfinite is not None:
            document["nonfinite"] = self.nonfinite
        return document


class JournalWriter:
    """Appends metrics to a journal. It never raises into the training: a full disk is logged once and costs records.

    :param path: the file; a torn last line of an earlier writer is cut off, and its numbers go on.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size, last = _mend(self._file)
        self._n = last.n if last else 0
        self._session = last.session + 1 if last else 1
        self._warned = False

    def append(self, metrics: Mapping[str, float], *, step: int, epoch: int | None = None) -> None:
        """Write one record for each metric, all with this moment's time."""
        time_ms = time.time_ns() // 1_000_000
        records: list[Record] = []
        for key, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                self._warn(f"the metric {key!r} is {type(value).__name__}, not a number")
                continue
            finite = math.isfinite(number)
            records.append(
                Record(
                    self._n + len(records) + 1, self._session, str(key), number if finite else None, int(step), time_ms,
                    epoch, None if finite else str(number),
                )
            )  # fmt: skip
        if self._write(b"".join(_line(record) for record in records)):
            self._n += len(records)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _write(self, data: bytes) -> bool:
        try:
            written = os.pwrite(self._file, data, self._size)
            if written == len(data):
                self._size += written
                return True
            os.ftruncate(self._file, self._size)
            self._warn(f"{self._path} is cut short: is the disk full?")
        except OSError as error:
            self._warn(f"cannot write {self._path}: {error.strerror}")
        return False

    def _warn(self, message: str) -> None:
        if not self._warned:
            log.warning("a metric is lost: %s", message)
        self._warned = True


class JournalReader:
    """Reads what has been added to a journal since the last call. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, limit: int | None = None) -> list[Record]:
        """Return new complete lines, at most ``limit`` of them. A line that is not a record is passed over."""
        records: list[Record] = []
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while (limit is None or len(records) < limit) and (line := file.readline()).endswith(b"\n"):
                    self._offset += len(line)
                    if (record := _parse(line)) is not None:
                        records.append(record)
        except FileNotFoundError:
            return []
        return records


def last_number(path: Path) -> int:
    """Return the number of the journal's last complete record, 0 when there is none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        record = _last(file, os.fstat(file).st_size)[1]
    finally:
        os.close(file)
    return record.n if record else 0


def last_line(path: Path) -> bytes:
    """Return the journal's last line, for a writer elsewhere to go on from; a torn one behind it is cut off."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        size = os.fstat(file).st_size
        end, _ = _last(file, size)
        if end < size and os.pread(file, 1, size - 1) != b"\n":
            os.ftruncate(file, end)
        start = max(0, end - _TAIL_BYTES)
        data = os.pread(file, end - start, start)
    finally:
        os.close(file)
    return data[data[:-1].rfind(b"\n") + 1 :]


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return the line of a record that was dumped."""
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _line(record: Record) -> bytes:
    return line_of(record.dump())


def _parse(line: bytes) -> Record | None:
    try:
        return Record.load(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _mend(file: int) -> tuple[int, Record | None]:
    """Cut off what follows the last good line; return the size and that line's record."""
    size = os.fstat(file).st_size
    end, record = _last(file, size)
    if end < size:
        os.ftruncate(file, end)
    return end, record


def _last(file: int, size: int) -> tuple[int, Record | None]:
    """Return where the last good line ends, and its record; a crash of the host may leave bad ones behind it."""
    start, data = size, b""
    while start:
        step = min(_TAIL_BYTES, start)
        start -= step
        data = os.pread(file, step, start) + data
        end = data.rfind(b"\n") + 1
        while end:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            if begin or not start:
                if (record := _parse(data[begin:end])) is not None:
                    return start + end, record
            else:
                break
            end = begin
    return 0, None
