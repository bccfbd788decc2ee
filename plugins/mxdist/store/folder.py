"""The run store in a folder: a local disk, or one that all hosts share."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from mxdist.errors import NotFound, StoreError
from mxdist.private import make_private
from mxdist.store.base import Entry, Store

_PARTIAL = ".partial-"


class FolderStore(Store):
    """Objects are files. A write is a temporary file, fsync and a rename; a create is a hard link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.uri = str(folder)

    def read(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise NotFound(f"{self.uri}/{key} does not exist") from None
        except OSError as error:
            raise _failed("read", self._path(key), error) from error

    def write(self, key: str, data: bytes) -> None:
        self._replace(key, lambda partial: partial.write_bytes(data))

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        try:
            partial = self._partial(path)
            try:
                partial.write_bytes(data)
                _flush(partial)
                os.link(partial, path)
            except FileExistsError:
                return path.read_bytes() == data
            finally:
                partial.unlink(missing_ok=True)
            _flush(path.parent)
        except OSError as error:
            raise _failed("create", path, error) from error
        return True

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Entry]:
        folder = self._path(prefix) if prefix.endswith("/") else self._path(prefix).parent if prefix else self._folder
        found = []
        for root, _, names in os.walk(folder):
            for name in names:
                key = (Path(root) / name).relative_to(self._folder).as_posix()
                if not name.startswith(_PARTIAL) and key.startswith(prefix) and key > after:
                    found.append(key)
        for key in sorted(found):
            try:
                yield Entry(key, (self._folder / key).stat().st_size)
            except FileNotFoundError:  # deleted while we walked
                continue

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def upload(self, key: str, path: Path) -> None:
        self._replace(key, lambda partial: shutil.copyfile(path, partial))

    def download(self, key: str, path: Path) -> None:
        partial = path.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._path(key), partial)
            partial.replace(path)
        except FileNotFoundError:
            raise NotFound(f"{self.uri}/{key} does not exist") from None
        except OSError as error:
            raise _failed("download", path, error) from error
        finally:
            partial.unlink(missing_ok=True)

    def child(self, prefix: str) -> FolderStore:
        return FolderStore(self._path(prefix))

    def _path(self, key: str) -> Path:
        parts = PurePosixPath(key).parts
        if key.startswith("/") or ".." in parts or "\0" in key:
            raise StoreError(f"the key {key!r} leads out of {self.uri}", retryable=False)
        return self._folder / key

    def _partial(self, path: Path) -> Path:
        make_private(path.parent)
        return path.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")

    def _replace(self, key: str, fill: object) -> None:
        path = self._path(key)
        try:
            partial = self._partial(path)
            try:
                fill(partial)  # type: ignore[operator]
                _flush(partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            _flush(path.parent)
        except OSError as error:
            raise _failed("write", path, error) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(verb: str, path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot {verb} {path}: {error.strerror or error}", hint="Check free space and permissions.")
