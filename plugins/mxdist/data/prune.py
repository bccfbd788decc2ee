"""Deleting old versions of a dataset: only what manifests of ours name, and never under a running staging.

A staging relies on blobs that are stored already, so a prune must not take them in between. Each announces itself
first and looks for the other afterwards; whatever the order, one of them sees the other. A prune that sees a staging
gives up, a staging that sees a prune waits. Both announcements outlive a kill: a staging's for a day at most, a
prune's until the next staging or prune has finished its work.

A job names its dataset in its claim, before anything of it runs. What the jobs of a run store name stays for as long
as they run, or wait to go on; a job that is submitted while a prune takes its version is told so before its first step.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypedDict

from mxdist.data.manifest import DatasetStore, open_dataset
from mxdist.errors import DataError, MxdistError, NotFound, StoreError
from mxdist.spec import JobState
from mxdist.spec.cluster import Storage
from mxdist.store import Attempt, Credentials, JobRun, Store, open_store
from mxdist.store.run import job_keys

log = logging.getLogger(__name__)

_STAGING_OLD_S = 86_400.0  # a staging that announced itself a day ago was killed
_PRUNING_OLD_S = 3_600.0  # a prune that began an hour ago was killed, and may be finished by another
_PATIENCE_S = 60.0
_POLL_S = 0.5


class Pruned(TypedDict):
    """What a prune deleted, or would delete: small, and plain JSON."""

    dry_run: bool
    versions: list[str]
    blobs: int
    bytes: int


def prune(
    uri: str,
    name: str,
    *,
    keep: int,
    runs_uri: str | None,
    protect: Collection[str] = (),
    dry_run: bool = True,
    max_share: float = 0.5,
    storage: Storage | None = None,
    credentials: Credentials | None = None,
) -> Pruned:
    """Delete old versions of a dataset, and the blobs that only these name.

    :param keep: how many versions stay, the newest by ``as_of``; the one staged last always stays.
    :param runs_uri: the run store of the jobs that train on the dataset, reached as the dataset is; versions that
        those name which are not over stay as well. None: there are no jobs.
    :param protect: versions that stay as well, such as those of models in use.
    :param dry_run: only say what would be deleted.
    :param max_share: refuse to delete more than this share of the versions.
    :raises DataError: a staging is under way, a manifest cannot be trusted, or ``max_share`` was passed.
    :raises StoreError: a store could not be reached, or what it says of a job cannot be read; no blob was deleted
        that a version may name.
    """
    where, runs = storage or Storage(), None
    if runs_uri is not None:
        runs = open_store(runs_uri, endpoint_url=where.endpoint_url, region=where.region, credentials=credentials)
    dataset = open_dataset(uri, name, storage, credentials)
    return prune_dataset(dataset, keep=keep, runs=runs, protect=protect, dry_run=dry_run, max_share=max_share)


def prune_dataset(
    dataset: DatasetStore,
    *,
    keep: int,
    runs: Store | None,
    protect: Collection[str] = (),
    dry_run: bool = True,
    max_share: float = 0.5,
) -> Pruned:
    """Prune an opened dataset; see ``prune``."""
    if keep < 1:
        raise DataError(f"keep must be at least 1, not {keep}: a prune never takes the newest version.")
    if dry_run:
        return _plan(dataset, keep, {*protect, *_in_use(runs)}, max_share).answer(dry_run=True)
    key = f"pruning/{uuid.uuid4().hex}.json"
    dataset.store.write_json(key, {"at": time.time(), "versions": [], "blobs": []})
    try:
        _refuse_while_staging(dataset)
        plan = _plan(dataset, keep, {*protect, *_in_use(runs)}, max_share)
        dataset.store.write_json(key, {"at": time.time(), "versions": plan.versions, "blobs": list(plan.blobs)})
    except MxdistError:  # nothing was deleted yet
        with suppress(StoreError):
            dataset.store.delete([key])
        raise
    _finish(dataset, key)
    for other, document in _announcements(dataset, "pruning/"):
        if _was_killed(document):
            _finish(dataset, other)
    return plan.answer(dry_run=False)


def _in_use(runs: Store | None) -> Iterator[str]:
    """Yield the dataset versions that jobs name which run, or wait to go on."""
    if runs is None:
        return
    for job_key in job_keys(runs):
        attempt = JobRun(runs, job_key).latest()
        if attempt is not None and _is_under_way(attempt):
            version = (attempt.claim.job.get("dataset") or {}).get("version")
            if version:
                yield version


def _is_under_way(attempt: Attempt) -> bool:
    result = attempt.result()
    return result is None or (result.state is JobState.PREEMPTED and attempt.given_up() is None)


class _Plan:
    """Versions to delete, and the blobs (with sizes) that no other version names."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.blobs: dict[str, int] = {}

    def answer(self, *, dry_run: bool) -> Pruned:
        return Pruned(dry_run=dry_run, versions=self.versions, blobs=len(self.blobs), bytes=sum(self.blobs.values()))


def _plan(dataset: DatasetStore, keep: int, protect: Collection[str], max_share: float) -> _Plan:
    versions = dataset.versions()
    last_staged = {entry["version"] for entry in dataset.history()[-1:]}
    kept = {*_by_date(dataset, versions)[-keep:], *protect, *last_staged}
    plan = _Plan()
    plan.versions = [version for version in versions if version not in kept]
    if len(plan.versions) > max_share * len(versions):
        raise DataError(
            f"pruning {dataset.store.uri} to {keep} would delete {len(plan.versions)} of {len(versions)} versions.",
            hint=f"That is more than max_share {max_share:g}; keep more, or raise it.",
        )
    for version in plan.versions:
        plan.blobs |= _named(dataset, version)
    _spare_named(dataset, plan.blobs, versions, without=set(plan.versions))
    return plan


def _by_date(dataset: DatasetStore, versions: list[str]) -> list[str]:
    """Return the versions, the one of the oldest data first; a version staged for several dates has the latest."""
    dates: dict[str, str] = {}
    for entry in dataset.history():
        dates[entry["version"]] = max(entry["as_of"], dates.get(entry["version"], ""))
    for version in versions:
        if version not in dates and (manifest := dataset.load(version)):  # killed before it was recorded
            dates[version] = manifest.as_of
    return sorted(versions, key=lambda version: (dates.get(version, ""), version))


def _named(dataset: DatasetStore, version: str) -> dict[str, int]:
    manifest = dataset.load(version)
    return {file.sha256: file.size for file in manifest.files} if manifest else {}


def _spare_named(dataset: DatasetStore, blobs: dict[str, int], seen: Collection[str], *, without: set[str]) -> None:
    """Take out of ``blobs`` whatever a version names that is not one of ``without``.

    :param seen: the versions that were there a moment ago.
    :raises StoreError: some of these are gone now, as when a share was lost; what they name cannot be known.
    """
    missing = set(seen) - without
    for version in set(dataset.versions()) - without:
        manifest = dataset.load(version)
        if manifest is not None:
            missing.discard(version)
            for file in manifest.files:
                blobs.pop(file.sha256, None)
    if missing:
        raise StoreError(
            f"{len(missing)} of {len(seen)} versions of {dataset.store.uri} were gone when they were looked for again.",
            hint="Is the store whole, and is nobody else pruning it? Then prune again.",
        )


def _was_killed(announcement: Mapping[str, Any]) -> bool:
    """Return whether a prune began so long ago that another may finish it; a live one must keep its announcement."""
    return bool(time.time() - announcement["at"] > _PRUNING_OLD_S)


def _finish(dataset: DatasetStore, key: str) -> None:
    """Delete what an announced prune named: manifests first, so that no visible version ever lacks a blob."""
    try:
        document = dataset.store.read_json(key)
    except NotFound:  # finished by another
        return
    versions, blobs = set(document["versions"]), dict.fromkeys(document["blobs"], 0)
    seen = dataset.versions()
    dataset.store.delete([dataset.manifest_key(version) for version in versions])
    dataset.forget(versions)
    _spare_named(dataset, blobs, set(seen) - versions, without=set())
    dataset.store.delete([f"blobs/{digest}" for digest in blobs])
    dataset.store.delete([key])
    log.info("Pruned %d versions and %d blobs of %s.", len(versions), len(blobs), dataset.store.uri)


def _refuse_while_staging(dataset: DatasetStore) -> None:
    for key, document in _announcements(dataset, "staging/"):
        if time.time() - document["at"] < _STAGING_OLD_S:
            raise DataError(
                f"a staging of {dataset.store.uri} is under way (process {document['pid']} on {document['host']}).",
                hint="Prune when it has ended.",
                retryable=True,
            )
        dataset.store.delete([key])


@contextmanager
def announced(dataset: DatasetStore) -> Iterator[None]:
    """Announce a staging for as long as the block runs, and wait for a prune that was first.

    :raises DataError: the prune does not end.
    """
    key = f"staging/{uuid.uuid4().hex}.json"
    dataset.store.write_json(key, {"at": time.time(), "host": socket.gethostname(), "pid": os.getpid()})
    try:
        _wait_for_prunes(dataset)
        yield
    except StoreError:  # the store does not answer: it would not take the announcement back either
        raise
    except BaseException:
        dataset.store.delete([key])
        raise
    dataset.store.delete([key])


def _wait_for_prunes(dataset: DatasetStore) -> None:
    """Wait for the prunes that are there now; one that comes later sees our announcement and gives up."""
    until = time.monotonic() + _PATIENCE_S
    waiting = dict(_announcements(dataset, "pruning/"))
    while waiting:
        for key, document in waiting.items():
            if _was_killed(document):
                _finish(dataset, key)
        still = {entry.key for entry in dataset.store.list("pruning/")}
        waiting = {key: document for key, document in waiting.items() if key in still}
        if waiting and time.monotonic() > until:
            raise DataError(
                f"a prune of {dataset.store.uri} does not end.",
                hint="If it was killed, the next staging or prune an hour after its start finishes it.",
                retryable=True,
            )
        if waiting:
            time.sleep(_POLL_S)


def _announcements(dataset: DatasetStore, prefix: str) -> Iterator[tuple[str, Any]]:
    for entry in list(dataset.store.list(prefix)):
        try:
            yield entry.key, dataset.store.read_json(entry.key)
        except NotFound:  # taken back meanwhile
            continue
