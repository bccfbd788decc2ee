"""From the store to a folder on a node, every byte verified.

The cache is content-addressed and shared by all processes of a host::

    blobs/<2 digits>/<sha256>    each content once, over all versions and datasets
    versions/<version>/...       one version, as it was staged: hard links to the blobs
    locks/<version>.lock         one process fills or repairs a version, the others wait for it
    locks/<version>.used         held, together, by the processes that read a version
    locks/blobs.lock             held, together, by the processes that fill one

`mxdist prune` takes nothing that is held. The kernel gives all of these back when a process ends, however it ends.

A file counts only after its SHA-256 was computed from the disk, in this call. So a damaged cache repairs itself, and a
damaged object in the store stops the job before its first step.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mxdist.data.manifest import DatasetStore, File, Manifest, load_manifest, sha256_of
from mxdist.data.pool import in_parallel
from mxdist.errors import DataError, NotFound
from mxdist.private import make_private
from mxdist.spec.cluster import Storage
from mxdist.store import Credentials

log = logging.getLogger(__name__)

BLOBS_LOCK = "blobs.lock"
_HELD: list[int] = []  # descriptors of this process, which the kernel closes at its end
_WORKERS = 8
_SMALL_BYTES = 4 << 20
_SPARE_BYTES = 64 << 20


def fetch(
    manifest_uri: str,
    version: str,
    cache: Path,
    *,
    storage: Storage | None = None,
    credentials: Credentials | None = None,
    session: str | None = None,
    hold: bool = False,
) -> Path:
    """Return a folder that holds exactly the files of one dataset version. Only read from it.

    :param cache: the cache of this host; made if it is not there.
    :param session: processes that name the same session (the ranks of one world) verify once, not once each.
    :param hold: keep the version from being pruned for as long as this process lives.
    :raises DataError: there is no such version, or a file of it is missing, cut short or damaged: it is named.
    :raises StoreError: the store could not be reached or refused.
    """
    cache = cache.absolute()
    folder, seen = cache / "versions" / version, cache / "versions" / f"{version}.session"
    dataset, manifest = load_manifest(manifest_uri, version, storage=storage, credentials=credentials)
    try:
        with _locked(cache / "locks" / f"{version}.lock"):
            if session is None or not seen.is_file() or seen.read_text() != session:
                seen.unlink(missing_ok=True)
                _fill(dataset, manifest, cache, folder)
                if session is not None:
                    seen.write_text(session)
            if hold:
                with locked(cache / "locks" / f"{version}.used", fcntl.LOCK_SH) as used:
                    _HELD.append(os.dup(used.fileno()))  # the lock lasts until both are closed
            os.utime(folder)  # so that a prune sees when it was asked for
    except OSError as error:
        raise DataError(
            f"cannot use the cache {cache}: {error.strerror or error}.",
            hint="Check free space and permissions.",
            retryable=True,
        ) from error
    return folder


def locked(path: Path, how: int) -> IO[str]:
    """Return an open file that holds a lock until it is closed: ``how`` is as for ``flock``.

    :raises BlockingIOError: another process holds it, and ``how`` says not to wait.
    """
    make_private(path.parent)
    file = path.open("a")
    try:
        fcntl.flock(file, how)
    except BaseException:
        file.close()
        raise
    return file


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        file = locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("Waiting for another process that fills the cache: %s.", path)
        file = locked(path, fcntl.LOCK_EX)
    with file:
        yield


def _fill(dataset: DatasetStore, manifest: Manifest, cache: Path, folder: Path) -> None:
    scratch = cache / "partial" / manifest.version
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    make_private(folder)
    _remove_strangers(folder, manifest)
    bad = [
        file
        for file, good in zip(
            manifest.files,
            in_parallel(lambda file: _holds(folder / file.path, file), manifest.files, _WORKERS),
            strict=True,
        )
        if not good
    ]
    if not bad:
        return
    make_private(scratch)
    distinct = list({file.sha256: file for file in bad}.values())
    _need_space(sum(file.size for file in distinct if not _blob(cache, file).exists()), cache)
    with locked(cache / "locks" / BLOBS_LOCK, fcntl.LOCK_SH):
        in_parallel(lambda file: _ensure_blob(dataset, file, _blob(cache, file), scratch), distinct, _WORKERS)
        for file in bad:
            _link(_blob(cache, file), folder / file.path, scratch)
    shutil.rmtree(scratch)


def _blob(cache: Path, file: File) -> Path:
    return cache / "blobs" / file.sha256[:2] / file.sha256


def _holds(path: Path, file: File) -> bool:
    """Return whether a regular file is there with exactly these bytes."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == file.size and sha256_of(path) == (file.sha256, file.size)


def _need_space(needed_bytes: int, cache: Path) -> None:
    free_bytes = shutil.disk_usage(cache).free
    if needed_bytes + _SPARE_BYTES > free_bytes and needed_bytes:
        raise DataError(
            f"the dataset needs {needed_bytes >> 20} MiB in {cache}, where {free_bytes >> 20} MiB are free.",
            hint="Free some space, or choose another work folder.",
        )


def _ensure_blob(dataset: DatasetStore, file: File, blob: Path, scratch: Path) -> None:
    if _holds(blob, file):
        return
    if blob.exists():
        log.warning("The cached copy of %s is damaged (%s); fetching it again.", file.path, blob)
    partial = scratch / uuid.uuid4().hex
    try:
        if file.size <= _SMALL_BYTES:
            partial.write_bytes(dataset.store.read(file.blob))
        else:
            dataset.store.download(file.blob, partial)
    except NotFound:
        raise _damaged(dataset, file, "is missing from the store") from None
    digest, size = sha256_of(partial)
    if size != file.size:
        raise _damaged(dataset, file, f"has {size} bytes in the store instead of {file.size}")
    if digest != file.sha256:
        raise _damaged(dataset, file, "is damaged in the store: its SHA-256 does not match")
    partial.chmod(0o444)
    make_private(blob.parent)
    partial.replace(blob)


def _damaged(dataset: DatasetStore, file: File, problem: str) -> DataError:
    return DataError(
        f"{file.path} of dataset {dataset.name} {problem} ({dataset.store.uri}/{file.blob}).",
        hint="Stage the same data again with `verify`, which sends anew what is missing or damaged.",
    )


def _link(blob: Path, target: Path, scratch: Path) -> None:
    make_private(target.parent)
    partial = scratch / uuid.uuid4().hex
    try:
        os.link(blob, partial)
    except OSError:  # a file system without hard links
        shutil.copyfile(blob, partial)
    partial.replace(target)


def _remove_strangers(folder: Path, manifest: Manifest) -> None:
    """Remove whatever the version does not name: links, files that a script left behind."""
    files = {file.path for file in manifest.files}
    folders = {parent.as_posix() for path in files for parent in Path(path).parents}
    for root, names, others in os.walk(folder):
        for name in [*names, *others]:
            path = Path(root, name)
            key = path.relative_to(folder).as_posix()
            is_folder = path.is_dir() and not path.is_symlink()
            if is_folder and key not in folders:
                shutil.rmtree(path)
            elif not is_folder and (key not in files or path.is_symlink()):
                path.unlink()
        names[:] = [name for name in names if Path(root, name).is_dir()]
