"""From a source to an immutable dataset version in the store.

Staging is incremental by content: a blob that is stored is never sent again, whatever its name, time or ETag. That
also makes it resumable: what a killed staging has sent counts for the next. The manifest comes last, so a version is
visible only when it is complete.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

from mxdist.data.arrays import check_files
from mxdist.data.manifest import (
    DatasetStore,
    File,
    Manifest,
    as_of_text,
    check_paths,
    open_dataset,
    sha256_of,
    version_of,
)
from mxdist.data.pool import in_parallel
from mxdist.data.prune import announced
from mxdist.data.sources import Source, open_source
from mxdist.errors import DataError
from mxdist.spec.cluster import Storage
from mxdist.spec.dataset import Split
from mxdist.store import Credentials, Store, open_store

log = logging.getLogger(__name__)

_SMALL_BYTES = 4 << 20  # read whole: one request, and the bytes that are sent are the bytes that were digested
_SMALL_WORKERS = 8
_LARGE_WORKERS = 2  # each sends several parts at once
_HASH_WORKERS = 4
_LABELS_SHOWN = 1000


class Staged(TypedDict):
    """What a staging hands back: small, and plain JSON.

    ``as_of`` is the latest date that this version was ever staged for: the same data are never older than before.
    """

    manifest_uri: str
    version: str
    as_of: str
    files: int
    bytes: int
    rows: int | None
    uploaded_files: int
    uploaded_bytes: int
    labels: list[int] | None


def stage(
    source: Source,
    uri: str,
    name: str,
    *,
    split: Split | None = None,
    as_of: datetime | str | None = None,
    verify: bool = False,
    storage: Storage | None = None,
    credentials: Credentials | None = None,
    scratch: Path | None = None,
) -> Staged:
    """Put a dataset into the store as one immutable version, and return what names it.

    :param source: a folder, ``mnist5k``, ``cifar10:`` with the folder or S3 URI of its binary files,
        ``module:function``, ``path.py:function``, or a function; a function is given an empty folder and fills it.
    :param uri: where datasets are kept: ``s3://bucket/prefix`` or a folder.
    :param name: the dataset's name.
    :param split: divide ``x.npy`` and ``y.npy`` into train, validation and test; None leaves files as they are.
    :param as_of: the end of the data interval; decides which of two versions is older. Default: now.
    :param verify: read what is stored already, too, and send anew what is not as it should be.
    :param scratch: where temporary files go; default: the system's place.
    :raises DataError: the source is absent, empty or not usable; nothing was published.
    :raises StoreError: the store could not be reached or refused; nothing was published.
    """
    date = as_of_text(as_of)
    dataset = open_dataset(uri, name, storage, credentials)
    where = storage or Storage()
    opener = partial(open_store, endpoint_url=where.endpoint_url, region=where.region, credentials=credentials)
    with open_source(source, split, scratch, opener=opener) as folder:
        return stage_folder(folder, dataset, date, verify=verify, scratch=scratch)


def stage_folder(
    folder: Path, dataset: DatasetStore, as_of: str, *, verify: bool = False, scratch: Path | None = None
) -> Staged:
    """Stage the files of ``folder`` as they are."""
    files = describe(folder)
    manifest = Manifest(dataset.name, version_of(files), as_of, tuple(files), _labels(folder, files))
    sent: list[File] = []
    damaged = _damaged(dataset, files, scratch) if verify else []
    if damaged or not _is_current(dataset, manifest):
        with announced(dataset):
            sent = upload(folder, [*_missing(dataset, files), *damaged], dataset.store)
            dataset.publish(manifest)
            latest = dataset.record(manifest.version, as_of)
    else:
        latest = dataset.record(manifest.version, as_of)
    log.info("Staged %s: %d files, sent %d.", dataset.manifest_uri(manifest.version), len(files), len(sent))
    return _staged(dataset, manifest, latest, sent)


def _is_current(dataset: DatasetStore, manifest: Manifest) -> bool:
    """Return whether this version is the newest (which no prune takes) and whole."""
    newest = dataset.history()[-1:]
    if not newest or newest[0]["version"] != manifest.version:
        return False
    return dataset.load(manifest.version) is not None and not _missing(dataset, manifest.files)


def _missing(dataset: DatasetStore, files: Iterable[File]) -> list[File]:
    """Return one file for each content that is not stored, or is stored with another size."""
    stored = dataset.blobs()
    return list({file.sha256: file for file in files if stored.get(file.sha256) != file.size}.values())


def _damaged(dataset: DatasetStore, files: Iterable[File], scratch: Path | None) -> list[File]:
    """Return one file for each content that is stored with its size, but not as it was staged."""
    stored = dataset.blobs()
    found = {file.sha256: file for file in files if stored.get(file.sha256) == file.size}

    def is_damaged(file: File) -> bool:
        with TemporaryDirectory(dir=scratch, prefix="mxdist-verify-") as place:
            copy = Path(place, "blob")
            dataset.store.download(file.blob, copy)
            return sha256_of(copy) != (file.sha256, file.size)

    verdicts = in_parallel(is_damaged, list(found.values()), _HASH_WORKERS)
    damaged = [file for file, bad in zip(found.values(), verdicts, strict=True) if bad]
    for file in damaged:
        log.warning("%s is stored, but damaged: it is sent anew.", file.path)
    return damaged


def _staged(dataset: DatasetStore, manifest: Manifest, as_of: str, sent: list[File]) -> Staged:
    labels = manifest.labels
    return Staged(
        manifest_uri=dataset.manifest_uri(manifest.version),
        version=manifest.version,
        as_of=as_of,
        files=len(manifest.files),
        bytes=manifest.size_bytes,
        rows=manifest.rows,
        uploaded_files=len(sent),
        uploaded_bytes=sum(file.size for file in sent),
        labels=None if labels is None or len(labels) > _LABELS_SHOWN else list(labels),
    )


def describe(folder: Path) -> list[File]:
    """Return every file of a folder with size and digest, sorted by path.

    :raises DataError: there is none, or one cannot be staged.
    """
    paths = sorted(_walk(folder), key=lambda path: path.as_posix())
    if not paths:
        raise DataError(f"there are no files in {folder}.", hint="Is the path right? An empty dataset is never staged.")
    names = [path.relative_to(folder).as_posix() for path in paths]
    check_paths(names, str(folder))
    rows = check_files(dict(zip(names, paths, strict=True)))
    return in_parallel(lambda name: _describe(folder / name, name, rows.get(name)), names, _HASH_WORKERS)


def _walk(folder: Path) -> Iterator[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}.") from error
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(path)
        elif entry.is_file():
            yield path
        else:
            what = "a link to a folder or to nothing" if entry.is_symlink() else "not a regular file"
            raise DataError(f"{path} is {what}; a dataset holds files, folders and links to files only.")


def _describe(path: Path, name: str, rows: int | None) -> File:
    try:
        digest, size = sha256_of(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
    top, slash, _ = name.partition("/")
    return File(name, size, digest, rows, top if rows is not None and slash else None)


def _labels(folder: Path, files: list[File]) -> tuple[int, ...] | None:
    """Return the distinct labels of all ``y.npy``, if there are any and they are integers."""
    found = [file.path for file in files if file.rows is not None and file.path.rpartition("/")[2] == "y.npy"]
    if not found:
        return None
    import numpy as np

    labels: set[int] = set()
    for path in found:
        try:
            array = np.load(folder / path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise DataError(f"{folder / path} is not an array that can be read: {error}.") from None
        if not np.issubdtype(array.dtype, np.integer):
            return None
        labels.update(int(label) for label in np.unique(array))
    return tuple(sorted(labels))


def upload(folder: Path, files: list[File], store: Store) -> list[File]:
    """Send these files as blobs, several at once and in bounded memory; return them.

    :raises DataError: a file changed since it was digested; its blob is not kept.
    """
    small = [file for file in files if file.size <= _SMALL_BYTES]
    large = [file for file in files if file.size > _SMALL_BYTES]
    in_parallel(lambda file: _send_small(folder / file.path, file, store), small, _SMALL_WORKERS)
    in_parallel(lambda file: _send_large(folder / file.path, file, store), large, _LARGE_WORKERS)
    return files


def _send_small(path: Path, file: File, store: Store) -> None:
    with path.open("rb") as stream:
        data = stream.read(file.size + 1)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise _changed(path)
    store.write(file.blob, data)


def _send_large(path: Path, file: File, store: Store) -> None:
    store.upload(file.blob, path)
    if sha256_of(path) != (file.sha256, file.size):
        store.delete([file.blob])
        raise _changed(path)


def _changed(path: Path) -> DataError:
    return DataError(f"{path} changed while it was staged.", hint="Stage data that nobody writes to.", retryable=True)
