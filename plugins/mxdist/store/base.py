"""What a run store must be able to do, wherever it lives."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdist.errors import StoreError


@dataclass(frozen=True)
class Entry:
    """One stored object: its key, relative to the store, and its size."""

    key: str
    size_bytes: int


class Store(ABC):
    """A flat map from keys (``a/b/c``) to bytes, under one URI.

    Writes are atomic: a reader sees the old bytes or the new ones. ``create`` is the one condition that every
    server keeps (S3: ``If-None-Match: *``); compare-and-swap, chunks and leases are built from it.

    :param may_vanish: all of it looks empty at times, as a share does that is not mounted.
    """

    uri: str
    may_vanish = False

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Return the object's bytes.

        :raises NotFound: there is none.
        :raises StoreError: the server could not be reached, or refused.
        """

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Create or replace the object."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Create the object; return False if one is there already.

        A create whose answer was lost is repeated, so an object that holds exactly ``data`` counts as ours: put a
        token in whatever two writers might race for.
        """

    @abstractmethod
    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Entry]:
        """Yield the objects whose keys start with ``prefix`` and sort after ``after``, in key order."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete these objects; those that are not there do not matter."""

    @abstractmethod
    def upload(self, key: str, path: Path) -> None:
        """Create or replace the object with a file's bytes, in bounded memory."""

    @abstractmethod
    def download(self, key: str, path: Path) -> None:
        """Write the object's bytes to a file, in bounded memory, replacing it only when complete.

        :raises NotFound: there is no such object.
        """

    @abstractmethod
    def child(self, prefix: str) -> Store:
        """Return the store of all keys under ``prefix/``."""

    def read_json(self, key: str) -> Any:
        """Return the object's JSON value."""
        try:
            return json.loads(self.read(key))
        except ValueError as error:
            raise StoreError(f"{self.uri}/{key} is not JSON: {error}", retryable=False) from None

    def write_json(self, key: str, value: object) -> None:
        """Create or replace the object with a JSON value."""
        self.write(key, encode(value))

    def create_json(self, key: str, value: object) -> bool:
        """Create the object with a JSON value; return False if one is there already."""
        return self.create(key, encode(value))

    def exists(self, key: str) -> bool:
        """Return whether the object is there."""
        return any(entry.key == key for entry in self.list(key))


def encode(value: object) -> bytes:
    """Return JSON as the store keeps it: sorted keys, so equal values are equal bytes."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()
