"""Where an attempt lives on a host, and the small files in which its processes tell each other how they are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL_BYTES = 16 << 10

JOURNAL = "journal.jsonl"
"""Rank 0's metrics, over all worlds of the attempt."""


@dataclass(frozen=True)
class Place:
    """Where an attempt lives on this host, and what its ranks must be told.

    :param secrets: values that go into the environment of the ranks and nowhere else.
    """

    folder: Path
    token: str
    attempt: int
    environment: Mapping[str, str]
    secrets: Mapping[str, str]

    @property
    def code(self) -> Path:
        """The code bundle."""
        return self.folder / "code"

    def world(self, number: int) -> Path:
        """Return the scratch folder of a world."""
        return self.folder / f"world-{number}"


def log_of(folder: Path, name: str) -> Path:
    """Return the file that takes the output of a process of a world, by the name that people call it."""
    return folder / f"{name.replace(' ', '-')}.log"


def tail(path: Path, limit: int = _TAIL_BYTES) -> bytes:
    """Return the last bytes of a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read(limit)
    except OSError:
        return b""


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object that another process may be replacing; empty if it is not there."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: object) -> None:
    """Replace a file by a JSON value, in one step for every reader."""
    replace_file(path, json.dumps(value).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file, in one step for every reader."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def world_numbers(folder: Path) -> Iterator[int]:
    """Yield the numbers of the worlds that were ever prepared in an attempt's scratch folder."""
    for path in folder.glob("world-*"):
        number = path.name.partition("-")[2]
        if number.isdigit():
            yield int(number)
