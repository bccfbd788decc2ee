"""The run store in a folder: a local disk, or one that all hosts share."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from mxdist.errors import NotFound, StoreError
from mxdist.private import make_private
from mxdist.store.base import Entry, Store

_PARTIAL = ".partial-"
_FORBIDDEN = {errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MISPLACED = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG}


class FolderStore(Store):
    """Objects are files. A write is a temporary file, fsync and a rename; a create is a hard link."""

    may_vanish = True

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
        for root, _, names in os.walk(folder, onerror=lambda error: _check_gone(error, folder)):
            for name in names:
                key = (Path(root) / name).relative_to(self._folder).as_posix()
                if not name.startswith(_PARTIAL) and key.startswith(prefix) and key > after:
                    found.append(key)
        for key in sorted(found):
            path = self._folder / key
            try:
                size_bytes = path.stat().st_size
            except FileNotFoundError:  # deleted while we walked
                continue
            except OSError as error:
                raise _failed("list", path, error) from error
            yield Entry(key, size_bytes)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
            except NotADirectoryError:
                continue
            except OSError as error:
                raise _failed("delete", path, error) from error

    def upload(self, key: str, path: Path) -> None:
        self._replace(key, lambda partial: shutil.copyfile(path, partial))

    def download(self, key: str, path: Path) -> None:
        source, partial = self._path(key), path.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(source, partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        except FileNotFoundError:
            raise NotFound(f"{self.uri}/{key} does not exist") from None
        except OSError as error:
            raise _failed(f"copy {source} to", path, error) from error

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


def _check_gone(error: OSError, top: Path) -> None:
    """Let a folder count as empty that is not there, or was deleted while we walked; any other trouble is an error."""
    path = Path(error.filename or top)
    if not isinstance(error, FileNotFoundError) and not (isinstance(error, NotADirectoryError) and path == top):
        raise _failed("list", path, error) from error


def _failed(verb: str, path: Path, error: OSError) -> StoreError:
    if error.errno in _FORBIDDEN:
        hint = "Check the permissions, and as which user this runs."
    elif error.errno in _FULL:
        hint = "Make room there, or raise the quota."
    elif error.errno in _MISPLACED:
        hint = "Check the path: a file may stand where a folder belongs."
    else:
        hint = "Is the disk or share mounted, and does its server answer?"
    retryable = error.errno not in _FORBIDDEN  # whatever else it is may pass, and a training should not end for it
    return StoreError(f"cannot {verb} {path}: {error.strerror or error}", hint=hint, retryable=retryable)
