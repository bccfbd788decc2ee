"""Checkpoints in the run store: arrays and JSON, never pickle, whole or not there at all.

::

    <attempt>/checkpoints/<step>-<token>/arrays.npz     a folder that one save owns
    <attempt>/checkpoints/<step>-<token>/state.json
    <attempt>/checkpoints/index/<step>.json             published last, created once: sizes and SHA-256 of the two

A folder without an index document is not a checkpoint. One whose files are not as its index says (torn, replaced) is
passed over, as is one that another training wrote.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxdist.barriers import reach
from mxdist.errors import CheckpointError, NotFound
from mxdist.spec import TrainingJob
from mxdist.store import Attempt
from mxdist.store.base import encode
from mxdist.store.sequence import WIDTH, numbered

log = logging.getLogger(__name__)

FORMAT = 1
_INDEX = "checkpoints/index"
_ARRAYS, _STATE = "arrays.npz", "state.json"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    :param attempt: the attempt that wrote it.
    :param values: JSON values by name.
    """

    step: int
    attempt: int
    arrays: dict[str, NDArray[Any]]
    values: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """Return arrays and values together, as ``Worker.checkpoint`` was given them."""
        return {**self.values, **self.arrays}


class Checkpoints:
    """The checkpoints of one training: written to one attempt, read from all that it goes on from.

    :param keep: complete checkpoints of this attempt that stay.
    """

    def __init__(self, attempt: Attempt, *, keep: int = 2) -> None:
        self._attempt = attempt
        self._store = attempt.store
        self._keep = keep
        job = attempt.claim.parsed()
        self._digest = job.training_digest() if isinstance(job, TrainingJob) else ""

    def save(self, arrays: Arrays, values: Mapping[str, Any], *, step: int) -> bool:
        """Write and publish one checkpoint; return False if this step has one already.

        :raises Fenced: a newer attempt owns the job.
        :raises StoreError: the store failed; nothing was published.
        """
        token = f"{self._attempt.claim.token[:8]}{uuid.uuid4().hex[:8]}"
        folder = f"checkpoints/{step:0{WIDTH}d}-{token}"
        files = {_ARRAYS: pack(arrays), _STATE: encode(dict(values))}
        for name, data in files.items():
            self._store.write(f"{folder}/{name}", data)
        reach(self._attempt.claim.job_key, f"checkpoint-{step}-written")
        self._attempt.check_fence()
        published = self._store.create_json(
            numbered(_INDEX, step),
            {
                "format": FORMAT,
                "step": step,
                "folder": folder,
                "attempt": self._attempt.number,
                "training_digest": self._digest,
                "files": {name: {"size": len(data), "sha256": _sha256(data)} for name, data in files.items()},
                "at": time.time(),
            },
        )
        if not published:
            self._store.delete([f"{folder}/{name}" for name in files])
        self.prune()
        return published

    def newest(self) -> Saved | None:
        """Return the newest complete checkpoint of this training, or None.

        :raises StoreError: the store could not be read; that is not the same as having none.
        """
        for step, number in sorted(self._published(), reverse=True):
            try:
                return self._load(self._at(number), step)
            except CheckpointError as error:
                log.warning("passed over: %s", error)
        self._attempt.job.attempt(self._attempt.number)  # a store that lacks this very attempt says nothing
        return None

    def prune(self) -> None:
        """Delete this attempt's older checkpoints, and folders of its own that never became one.

        The index goes first: what has an index is complete.
        """
        steps = sorted(self._steps(self._attempt))
        if not steps:
            return
        old, oldest_kept = steps[: -self._keep], steps[-self._keep :][0]
        self._store.delete([numbered(_INDEX, step) for step in old])
        doomed = [
            entry.key
            for entry in self._store.list("checkpoints/")
            if (step := _step_of(entry.key)) is not None and step < oldest_kept
        ]
        self._store.delete(doomed)

    def _published(self) -> Iterator[tuple[int, int]]:
        claim = self._attempt.claim
        for number in range(claim.origin, claim.number + 1):
            try:
                attempt = self._at(number)
            except NotFound:
                continue
            for step in self._steps(attempt):
                yield step, number

    def _at(self, number: int) -> Attempt:
        return self._attempt if number == self._attempt.number else self._attempt.job.attempt(number)

    @staticmethod
    def _steps(attempt: Attempt) -> list[int]:
        names = [entry.key.rpartition("/")[2].removesuffix(".json") for entry in attempt.store.list(f"{_INDEX}/")]
        return [int(name) for name in names if name.isdigit()]

    def _load(self, attempt: Attempt, step: int) -> Saved:
        where = f"{attempt.store.uri}/{numbered(_INDEX, step)}"
        index = self._index(attempt, step, where)
        files = {name: _verified(attempt, index, name, where) for name in (_ARRAYS, _STATE)}
        return Saved(step, attempt.number, unpack(files[_ARRAYS], where), json.loads(files[_STATE]))

    def _index(self, attempt: Attempt, step: int, where: str) -> dict[str, Any]:
        try:
            index = json.loads(attempt.store.read(numbered(_INDEX, step)))
            format_, digest = index["format"], index["training_digest"]
            described = {index["step"], *(index["files"][name]["size"] for name in (_ARRAYS, _STATE))}
            inside = index["folder"].startswith("checkpoints/") and ".." not in index["folder"]
        except (ValueError, KeyError, TypeError, AttributeError, NotFound) as error:
            raise CheckpointError(f"{where} cannot be read ({type(error).__name__})") from None
        if format_ != FORMAT or digest != self._digest or step not in described or not inside:
            raise CheckpointError(f"{where} belongs to another training, or to another mxdist")
        found: dict[str, Any] = index
        return found


def save_state(attempt: Attempt, state: Mapping[str, Any], *, step: int) -> bool:
    """Save a script's state, arrays and JSON values in one mapping.

    :raises CheckpointError: a value is neither.
    """
    arrays = {name: value for name, value in state.items() if _is_array(value)}
    values = {name: value for name, value in state.items() if name not in arrays}
    try:
        encode(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a checkpoint holds arrays and JSON values only: {error}") from None
    host = {name: np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value) for name, value in arrays.items()}
    job = attempt.claim.parsed()
    keep = job.checkpoints.keep if isinstance(job, TrainingJob) else 2
    return Checkpoints(attempt, keep=keep).save(host, values, step=step)


def pack(arrays: Arrays) -> bytes:
    """Return arrays as the bytes of an npz file: the same arrays always give the same bytes.

    :raises CheckpointError: an array holds objects, which only pickle could keep.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name in sorted(arrays):
            if arrays[name].dtype.hasobject:
                raise CheckpointError(f"{name} holds Python objects; a checkpoint holds numbers only")
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(arrays[name]), allow_pickle=False)
    return out.getvalue()


def unpack(data: bytes, where: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file.

    :raises CheckpointError: it is not one, or holds what only pickle could read.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{where} holds no arrays that can be read: {error}") from None


def _verified(attempt: Attempt, index: Mapping[str, Any], name: str, where: str) -> bytes:
    key, expected = f"{index['folder']}/{name}", index["files"][name]
    try:
        data = attempt.store.read(key)
    except NotFound:
        raise CheckpointError(f"{where} names {name}, which is gone") from None
    if len(data) != expected["size"] or _sha256(data) != expected["sha256"]:
        raise CheckpointError(f"{attempt.store.uri}/{key} is torn or was changed")
    return data


def _step_of(key: str) -> int | None:
    """Return the step of a file in a checkpoint's folder; None for anything else."""
    step, dash, _ = key.split("/")[1].partition("-")
    return int(step) if dash and step.isdigit() and len(step) == WIDTH else None


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "asnumpy")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
