"""What a dataset version is: its files by digest, under a manifest that is published last and never changes.

In the store, a dataset called ``mnist`` is::

    mnist/blobs/<sha256>              the bytes, each content once, whatever it is called
    mnist/manifests/<version>.json    one version; a reader that finds it finds all of its blobs
    mnist/history/<number>.json       which version was staged for which date, changed by compare-and-swap
    mnist/staging/, mnist/pruning/    announcements, so that a prune and a staging never meet (see ``prune.py``)
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from mxdist.errors import DataError, NotFound
from mxdist.spec.base import digest_of
from mxdist.spec.cluster import Storage
from mxdist.store import Credentials, Register, Store, Versioned, open_store

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEGMENT_BYTES = 255  # the longest name that a node's file system takes
_CHUNK_BYTES = 1 << 20
_SHOWN = 5


@dataclass(frozen=True)
class File:
    """One file of a version: its path (``/`` between folders), size and SHA-256, and what is known about it."""

    path: str
    size: int
    sha256: str
    rows: int | None = None
    split: str | None = None

    @property
    def blob(self) -> str:
        """Return the key of the file's bytes, relative to the dataset."""
        return f"blobs/{self.sha256}"


@dataclass(frozen=True)
class Manifest:
    """One immutable version of a dataset.

    :param version: the digest of the files alone (see ``version_of``), so equal data are one version.
    :param as_of: the end of the data interval that this version was first staged for.
    :param labels: the distinct labels of an array dataset.
    """

    name: str
    version: str
    as_of: str
    files: tuple[File, ...]
    labels: tuple[int, ...] | None = None

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values; what is not known about a file is left out."""
        files = [{key: value for key, value in asdict(file).items() if value is not None} for file in self.files]
        labels = {} if self.labels is None else {"labels": list(self.labels)}
        return {
            "format": FORMAT,
            "name": self.name,
            "version": self.version,
            "as_of": self.as_of,
            "files": files,
        } | labels

    @classmethod
    def from_document(cls, document: Any, where: str) -> Self:
        """Return the manifest that ``document`` describes, checked: paths are safe and the version is its digest.

        :raises DataError: it is not a manifest of ours, or somebody changed it.
        """
        try:
            if document["format"] != FORMAT:
                raise DataError(f"{where} has format {document['format']!r}; this mxdist reads format {FORMAT}.")
            files = tuple(_file(item) for item in document["files"])
            labels = None if document.get("labels") is None else tuple(int(label) for label in document["labels"])
            manifest = cls(str(document["name"]), str(document["version"]), str(document["as_of"]), files, labels)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{where} is not a manifest of mxdist: {type(error).__name__}: {error}.") from None
        check_paths((file.path for file in files), where)
        if version_of(files) != manifest.version:
            raise DataError(f"{where} was changed: its files do not have the digest {manifest.version}.")
        return manifest

    @property
    def rows(self) -> int | None:
        """Return the number of examples, if the files say so: each example counts once, not once an array."""
        counted = [file for file in self.files if file.rows is not None]
        labelled = [file for file in counted if file.path.rpartition("/")[2] == "y.npy"]
        return sum(file.rows or 0 for file in labelled or counted) if counted else None

    @property
    def size_bytes(self) -> int:
        """Return the size of all files together."""
        return sum(file.size for file in self.files)


def _file(item: Mapping[str, Any]) -> File:
    file = File(**item)
    sizes = [file.size, *([] if file.rows is None else [file.rows])]
    if not (
        isinstance(file.path, str)
        and all(type(size) is int and size >= 0 for size in sizes)
        and _SHA256.fullmatch(file.sha256)
        and (file.split is None or isinstance(file.split, str))
    ):
        raise ValueError(f"a file is described wrongly: {item!r}")
    return file


def version_of(files: Iterable[File]) -> str:
    """Return the version: SHA-256 of the canonical JSON list of ``[path, size, sha256]``, sorted by path."""
    return digest_of(sorted([file.path, file.size, file.sha256] for file in files))


def sha256_of(path: Path) -> tuple[str, int]:
    """Return a file's SHA-256 (hex) and size, both of the bytes that were read, in bounded memory."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def check_paths(paths: Iterable[str], where: str) -> None:
    """Refuse paths that could leave a folder, or that cannot all be files of one folder on every node.

    :raises DataError: naming the first few of them.
    """
    known = list(paths)
    wrong = [f"{path!r} {problem}" for path in known if (problem := _problem(path))]
    wrong += [f"{path!r} is there twice" for path, count in Counter(known).items() if count > 1]
    wrong = wrong or _clashes(known)
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise DataError(f"{where} has file names that cannot be used: {'; '.join(wrong[:_SHOWN])}{more}.")


def _problem(path: str) -> str:
    segments = path.split("/")
    if "\0" in path:
        return "holds a NUL"
    if path.startswith("/"):
        return "is absolute"
    if ".." in segments:
        return "leads out of its folder"
    if "" in segments or "." in segments:
        return "has an empty part or '.' between its slashes"
    try:
        too_long = max(len(segment.encode()) for segment in segments) > _SEGMENT_BYTES
    except UnicodeEncodeError:
        return "is not UTF-8"
    return f"has a part longer than {_SEGMENT_BYTES} bytes" if too_long else ""


def _clashes(paths: list[str]) -> list[str]:
    """Return what is both file and folder, or differs from another name only in upper and lower case."""
    files, spelling, wrong = set(paths), dict[str, str](), dict[str, None]()
    for path in paths:
        segments = path.split("/")
        for depth in range(1, len(segments) + 1):
            part = "/".join(segments[:depth])
            twin = spelling.setdefault(part.casefold(), part)
            if twin != part:
                wrong[f"{part!r} and {twin!r} differ only in case"] = None
            if depth < len(segments) and part in files:
                wrong[f"{part!r} is both a file and a folder"] = None
    return list(wrong)


def as_of_text(as_of: str | datetime | None) -> str:
    """Return a date in the one form that sorts as text: UTC, to the second. None is now; without a zone it is UTC.

    :raises DataError: the text is no ISO 8601 date.
    """
    if isinstance(as_of, str):
        try:
            as_of = datetime.fromisoformat(as_of)
        except ValueError:
            raise DataError(f"as_of {as_of!r} is not an ISO 8601 date such as 2026-12-01T00:00:00Z.") from None
    moment = datetime.now(UTC) if as_of is None else as_of
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return aware.isoformat(timespec="seconds")


class DatasetStore:
    """One dataset's part of the store.

    :param data: the store of all datasets.
    :param name: the dataset: letters, digits, ``.``, ``_`` and ``-``.
    """

    def __init__(self, data: Store, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise DataError(f"{name!r} cannot name a dataset: use letters, digits, '.', '_', '-'; at most 100.")
        self.name = name
        self.store = data.child(name)
        self._history = Register(self.store, "history")

    def manifest_key(self, version: str) -> str:
        """Return the key of a version's manifest."""
        return f"manifests/{version}.json"

    def manifest_uri(self, version: str) -> str:
        """Return the URI of a version's manifest."""
        return f"{self.store.uri}/{self.manifest_key(version)}"

    def load(self, version: str) -> Manifest | None:
        """Return a version's manifest, checked, or None if there is none."""
        where = self.manifest_uri(version)
        try:
            document = self.store.read_json(self.manifest_key(version))
        except NotFound:
            return None
        manifest = Manifest.from_document(document, where)
        if manifest.version != version:
            raise DataError(f"{where} holds version {manifest.version}.")
        return manifest

    def publish(self, manifest: Manifest) -> Manifest:
        """Make a version visible; if it is already, return what was published first."""
        self.store.create_json(self.manifest_key(manifest.version), manifest.to_document())
        return self.load(manifest.version) or manifest

    def versions(self) -> list[str]:
        """Return every published version, in no order that means anything."""
        keys = (entry.key.removeprefix("manifests/") for entry in self.store.list("manifests/"))
        return [key.removesuffix(".json") for key in keys if _SHA256.fullmatch(key.removesuffix(".json"))]

    def blobs(self) -> dict[str, int]:
        """Return the digests that are stored, with the sizes of their objects."""
        return {entry.key.removeprefix("blobs/"): entry.size_bytes for entry in self.store.list("blobs/")}

    def history(self) -> list[dict[str, str]]:
        """Return ``{"version", "as_of"}`` of every staging that changed something, oldest first."""
        return list(self._history.read().value or [])

    def as_of(self, manifest: Manifest) -> str:
        """Return the latest date that a version was staged for: old content may be current again."""
        return _latest(self.history(), manifest.version) or manifest.as_of

    def record(self, version: str, as_of: str) -> str:
        """Say that ``version`` was staged for ``as_of``, if that is not the last thing said; return its latest date."""
        entry = {"version": version, "as_of": as_of}
        entries = self._change_history(lambda entries: entries if entries[-1:] == [entry] else [*entries, entry])
        return _latest(entries, version)

    def forget(self, versions: set[str]) -> None:
        """Take versions out of the history."""
        self._change_history(lambda entries: [entry for entry in entries if entry["version"] not in versions])

    def _change_history(self, change: Callable[[list[dict[str, str]]], list[dict[str, str]]]) -> list[dict[str, str]]:
        while True:
            seen: Versioned = self._history.read()
            before = list(seen.value or [])
            after = change(before)
            if after == before:
                return after
            if self._history.swap(seen, after) is not None:
                self._history.prune(keep=10)
                return after


def _latest(history: list[dict[str, str]], version: str) -> str:
    """Return the latest date that a version was staged for, or ''."""
    return max((entry["as_of"] for entry in history if entry["version"] == version), default="")


def open_dataset(uri: str, name: str, storage: Storage | None, credentials: Credentials | None) -> DatasetStore:
    """Return the dataset ``name`` under ``uri`` (``s3://bucket/prefix`` or a folder)."""
    where = storage or Storage()
    store = open_store(uri, endpoint_url=where.endpoint_url, region=where.region, credentials=credentials)
    return DatasetStore(store, name)


def load_manifest(
    manifest_uri: str, version: str, *, storage: Storage | None = None, credentials: Credentials | None = None
) -> tuple[DatasetStore, Manifest]:
    """Return a published version, and the dataset that it belongs to.

    :raises DataError: there is none, or it cannot be trusted.
    """
    uri, _, file = manifest_uri.rpartition("/manifests/")
    parent, _, name = uri.rpartition("/")
    if not parent or file != f"{version}.json":
        raise DataError(
            f"{manifest_uri!r} is not the manifest of version {version}.",
            hint="Give manifest_uri and version as the staging returned them.",
        )
    dataset = open_dataset(parent, name, storage, credentials)
    manifest = dataset.load(version)
    if manifest is None:
        raise DataError(f"there is no dataset at {manifest_uri}.", hint="Stage it first, or was that version pruned?")
    return dataset, manifest
