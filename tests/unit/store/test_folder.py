"""A folder that cannot be read is not an empty one: shares go stale, lose their server, or shut a user out."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from mxdist.errors import NotFound, StoreError
from mxdist.spec import TrainingJob
from mxdist.store import Attempt, Chunks, JobRun, State, Store, open_store
from support.share import sicken

JOB = TrainingJob.parse({"name": "job", "script": {"path": "/train.py"}})
TROUBLES = [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOTCONN]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def store(root: Path) -> Store:
    store = open_store(str(root))
    store.write("a/b", b"one")
    return store


@pytest.fixture
def first(store: Store) -> Attempt:
    return JobRun(store, "job-1").claim(JOB, after=0)


@pytest.mark.parametrize("code", TROUBLES)
def test_a_folder_that_cannot_be_listed_is_no_empty_one(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    sicken(monkeypatch, root / "a", "list", code=code)
    for prefix in ("", "a/", "a/b"):
        with pytest.raises(StoreError, match=f"cannot list {root}/a: "):
            list(store.list(prefix))
    with pytest.raises(StoreError):
        store.exists("a/b")


def test_a_replaced_attempt_does_not_pass_for_the_newest(
    first: Attempt, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.job.claim(JOB, after=1)
    sicken(monkeypatch, root, "list")
    with pytest.raises(StoreError, match="cannot list"):
        first.check_fence()


def test_a_job_that_cannot_be_looked_for_is_not_new(
    first: Attempt, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sicken(monkeypatch, root, "list")
    with pytest.raises(StoreError, match="cannot list"):
        first.job.latest()


def upload(store: Store) -> None:
    source = Path(store.uri).with_name("source")
    source.write_bytes(b"x")
    store.upload("a/c", source)


CALLS: dict[str, tuple[str, Callable[[Store], object]]] = {
    "read": ("open", lambda store: store.read("a/b")),
    "write": ("open", lambda store: store.write("a/c", b"x")),
    "create": ("open", lambda store: store.create("a/c", b"x")),
    "create in no folder": ("look", lambda store: store.create("d/c", b"x")),
    "upload": ("open", upload),
    "download": ("open", lambda store: store.download("a/b", Path(store.uri).with_name("target"))),
    "delete": ("unlink", lambda store: store.delete(["a/b"])),
    "size": ("look", lambda store: list(store.list("a/"))),
    "chunks": ("list", lambda store: Chunks(store, "a").last()),
}


@pytest.mark.parametrize("code", TROUBLES)
@pytest.mark.parametrize("call", CALLS)
def test_every_trouble_is_one_clear_error(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    broken, act = CALLS[call]
    with monkeypatch.context() as patch:
        sicken(patch, root, broken, code=code)
        with pytest.raises(StoreError, match=rf"^cannot \w+ .*{root}.*[.?]$") as caught:
            act(store)
    assert caught.value.retryable == (code != errno.EACCES), "permissions do not come back by themselves"
    assert ("permissions" in caught.value.hint) == (code == errno.EACCES)
    assert store.read("a/b") == b"one"


def test_what_is_not_there_is_still_empty(store: Store) -> None:
    assert list(store.list("never/")) == []
    assert list(store.child("a").child("b").list()) == [], "a file holds nothing"
    store.delete(["never", "a/b/under a file"])


def test_a_store_that_looks_unmounted_says_nothing_of_a_job(first: Attempt, root: Path) -> None:
    assert first.read_state() == State()
    with pytest.raises(NotFound):
        first.job.attempt(2)
    root.rename(root.with_name("share"))
    root.mkdir()
    first.store.write_json("seen.json", {})  # what somebody writes there does not make it the share
    for ask in (lambda: first.job.attempt(1), first.read_state):
        with pytest.raises(StoreError, match="holds no job, not even job-1") as caught:
            ask()
        assert caught.value.retryable
