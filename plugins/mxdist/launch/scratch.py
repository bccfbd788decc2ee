"""Deleting what jobs have left on this host: scratch folders of attempts that are over, and datasets nobody uses.

The run store keeps all that a later attempt needs, so the scratch folder of an attempt that has a result is there for
people only: its full logs, its copy of the code, its exported model. A folder counts as an attempt's only if its own
``attempt.json`` says so, and it is deleted only if the run store named there has the attempt's result.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdist import processes
from mxdist.data.fetch import BLOBS_LOCK, locked
from mxdist.errors import MxdistError
from mxdist.store import JobRun, open_store
from mxdist.store.sequence import WIDTH

DATASETS = ".datasets"
CODE = "code"
_PRUNED = ".pruned-"
_DIGEST_LETTERS = 64
_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB


@dataclass(frozen=True)
class Left:
    """One folder or file that a prune looked at.

    :param size_bytes: what it holds; 0 if it stays.
    :param kept: why it stays; empty if it was deleted, or would be.
    """

    path: Path
    size_bytes: int = 0
    kept: str = ""


def prune_scratch(workdir: Path, *, older_than_s: float, dry_run: bool = False) -> Iterator[Left]:
    """Delete the scratch folders of attempts that ended ``older_than_s`` seconds ago or earlier; yield each.

    :param workdir: the folder that holds the scratch folders of all jobs.
    :param dry_run: only say what would be deleted.
    """
    if not dry_run:
        _finish_killed_prunes(workdir)
    for folder, told in _attempts(workdir):
        kept = _why_kept(told, older_than_s)
        if kept:
            yield Left(folder, kept=kept)
            continue
        size = _size(folder)
        if not dry_run:
            _delete(folder)
            with suppress(OSError):  # other attempts of this job are left
                folder.parent.rmdir()
        yield Left(folder, size)
    yield from _prune_code(workdir, time.time() - older_than_s, dry_run)


def prune_datasets(workdir: Path, *, older_than_s: float, dry_run: bool = False) -> Iterator[Left]:
    """Delete the copies of dataset versions that no world has asked for in the last ``older_than_s`` seconds.

    All of them stay while a job of this work folder is under way, and each while any process reads it, such as that
    of `mxdist plan --estimate`. A version that is needed again is fetched again.
    """
    cache = workdir / DATASETS
    for folder, told in _attempts(workdir):
        if _why_kept(told, 0.0):
            yield Left(cache, kept=f"the attempt in {folder} is not over")
            return
    before = time.time() - older_than_s
    for folder in sorted(path for path in cache.glob("versions/*") if path.is_dir()):
        yield from _prune_version(cache, folder, before, dry_run)
    if not dry_run and (cache / "blobs").is_dir():
        yield from _prune_unlinked(cache, before)


def _prune_code(workdir: Path, before: float, dry_run: bool) -> Iterator[Left]:
    """Delete the code that was sent here by its digest, and that no attempt here runs from, or has lately."""
    links = [folder / CODE for folder, _ in _attempts(workdir)]
    used = {link.resolve() for link in links if link.is_symlink()}
    for folder in sorted((workdir / CODE).glob("[0-9a-f]*")):
        if not folder.is_dir() or len(folder.name) != _DIGEST_LETTERS or folder.stat().st_mtime > before:
            continue
        if folder.resolve() in used:
            yield Left(folder, kept="an attempt that is here runs from it")
            continue
        size = _size(folder)
        if not dry_run:
            _delete(folder)
            folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)
        yield Left(folder, size)


def _attempts(workdir: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the scratch folders below ``workdir``, each with its ``attempt.json``; other folders are none of ours.

    That of an agent ends with the number of its host.
    """
    numbers = "[0-9]" * WIDTH
    found = (workdir.glob(f"*/{name}/attempt.json") for name in (numbers, f"{numbers}@*"))
    for path in sorted(itertools.chain.from_iterable(found)):
        folder = path.parent
        with suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(path.read_bytes())
            if (told["job_key"], told["attempt"]) == (folder.parent.name, int(folder.name[:WIDTH])) and told["token"]:
                yield folder, told


def _why_kept(told: dict[str, Any], older_than_s: float) -> str:
    """Return why an attempt's folder must stay; empty if nobody needs it."""
    if processes.find(told["token"]):
        return "its processes run"
    storage = told["storage"]
    try:
        runs = open_store(told["runs_uri"], endpoint_url=storage["endpoint_url"], region=storage["region"])
        result = JobRun(runs, told["job_key"]).attempt(told["attempt"]).result()
    except MxdistError as error:
        return f"how it ended is not known: {error}"
    if result is None:
        return "it has no result"
    return "it ended a short while ago" if time.time() - result.ended_at < older_than_s else ""


def _prune_version(cache: Path, folder: Path, before: float, dry_run: bool) -> Iterator[Left]:
    session = folder.with_name(f"{folder.name}.session")  # written by every world that uses the version
    locks = cache / "locks"
    with ExitStack() as held:
        try:
            held.enter_context(locked(locks / f"{folder.name}.lock", _AT_ONCE))
            held.enter_context(locked(locks / f"{folder.name}.used", _AT_ONCE))
        except BlockingIOError:
            yield Left(folder, kept="a process fetches or reads it")
            return
        if max(path.stat().st_mtime for path in (folder, session) if path.exists()) > before:
            yield Left(folder, kept="it was used a short while ago")
            return
        size = _size(folder, lambda found: found.st_nlink <= 2)  # what other versions share stays
        if not dry_run:
            session.unlink(missing_ok=True)
            _delete(folder)
    yield Left(folder, size)


def _prune_unlinked(cache: Path, before: float) -> Iterator[Left]:
    blobs = cache / "blobs"
    try:
        lock = locked(cache / "locks" / BLOBS_LOCK, _AT_ONCE)
    except BlockingIOError:  # a process that fills a version may be about to link one
        yield Left(blobs, kept="a process fetches a version")
        return
    with lock:
        size = sum(_prune_blobs(cache, before))
    if size:
        yield Left(blobs, size)


def _prune_blobs(cache: Path, before: float) -> Iterator[int]:
    """Delete the contents that no version links to any more; yield the size of those that no version had."""
    for blob in cache.glob("blobs/*/*"):
        with suppress(FileNotFoundError):
            found = blob.stat()
            if found.st_nlink == 1 and found.st_mtime < before:
                blob.unlink()
                if found.st_ctime < before:
                    yield found.st_size


def _delete(folder: Path) -> None:
    """Delete a folder, which vanishes at once: nobody finds half of it."""
    doomed = folder.with_name(f"{_PRUNED}{uuid.uuid4().hex}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _finish_killed_prunes(workdir: Path) -> None:
    for doomed in [*workdir.glob(f"*/{_PRUNED}*"), *(workdir / DATASETS / "versions").glob(f"{_PRUNED}*")]:
        shutil.rmtree(doomed, ignore_errors=True)


def _size(folder: Path, counts: Callable[[os.stat_result], bool] = lambda _: True) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found = os.lstat(Path(root, name))
                total += found.st_size if counts(found) else 0
    return total
