"""The interface that a folder and S3 keep alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mxdist.errors import NotFound, SpecError, StoreError
from mxdist.store import Store, open_store


def test_reads_what_was_written(store: Store, open_again: Callable[[], Store]) -> None:
    store.write("a/b", b"one")
    store.write("a/b", b"two")
    assert open_again().read("a/b") == b"two"
    assert open_again().child("a").read("b") == b"two"


@pytest.mark.parametrize("data", [b"", b"x", b"\x00" * 100_000], ids=["empty", "one", "zeros"])
def test_bytes_come_back_unchanged(store: Store, tmp_path: Path, data: bytes) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.write_bytes(data)
    store.upload("blob", source)
    store.download("blob", target)
    assert target.read_bytes() == data == store.read("blob")


def test_absent_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing/here does not exist"):
        store.read("nothing/here")
    with pytest.raises(NotFound):
        store.download("nothing/here", tmp_path / "target")
    assert list(tmp_path.glob("**/.partial-*")) == []
    assert not store.exists("nothing/here")
    store.delete(["nothing/here"])


def test_create_has_one_winner(open_again: Callable[[], Store]) -> None:
    stores, start = [open_again() for _ in range(16)], threading.Barrier(16)

    def race(number: int) -> bool:
        start.wait()
        return stores[number].create("prize", f"writer {number}".encode())

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(race, range(16)))
    assert won.count(True) == 1
    assert stores[0].read("prize") == f"writer {won.index(True)}".encode()


def test_create_repeated_after_a_lost_answer_is_still_ours(store: Store) -> None:
    assert store.create("claim", b"token 1")
    assert store.create("claim", b"token 1")
    assert not store.create("claim", b"token 2")


def test_list_is_sorted_and_keeps_siblings_apart(store: Store) -> None:
    for key in ("m-1/b", "m-1/a/c", "m-10/x", "m-1.bak/y", "m-1"[:2] + "/z", "m-1/a-b"):
        store.write(key, key.encode())
    assert [entry.key for entry in store.list("m-1/")] == ["m-1/a-b", "m-1/a/c", "m-1/b"]
    assert [entry.key for entry in store.list("m-1/", after="m-1/a/c")] == ["m-1/b"]
    assert [entry.key for entry in store.child("m-1").list()] == ["a-b", "a/c", "b"]
    assert {entry.size_bytes for entry in store.list("m-10")} == {6}


def test_more_than_a_page_is_listed_and_deleted(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: store.write(f"many/{number:04d}", b"x"), range(1005)))
    keys = [entry.key for entry in store.list("many/")]
    assert keys == [f"many/{number:04d}" for number in range(1005)]
    store.delete(keys)
    assert list(store.list("many/")) == []


def test_a_reader_sees_old_or_new_but_never_half(store: Store, open_again: Callable[[], Store]) -> None:
    versions = [bytes([letter]) * 200_000 for letter in b"ab"]
    store.write("document", versions[0])
    reader, seen = open_again(), set()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [store.write("document", versions[turn % 2]) for turn in range(30)])
        while not writing.done():
            seen.add(reader.read("document"))
        writing.result()
    assert seen <= set(versions)


def test_json_that_is_none_is_named(store: Store) -> None:
    store.write("state.json", b"{ torn")
    with pytest.raises(StoreError, match=r"state\.json is not JSON"):
        store.read_json("state.json")


@pytest.mark.parametrize("key", ["../out", "a/../../out", "/etc/passwd", "a\0b"])
def test_a_folder_is_not_left(tmp_path: Path, key: str) -> None:
    store = open_store(str(tmp_path / "runs"))
    with pytest.raises(StoreError, match="leads out of"):
        store.write(key, b"x")


def test_a_full_or_closed_disk_is_one_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(StoreError, match=r"cannot write .* a file may stand where a folder belongs") as caught:
        open_store(str(blocked)).write("key", b"x")
    assert caught.value.retryable, "a training waits until it is out of the way"


@pytest.mark.parametrize("uri", ["", "relative/path", "s3://", "gs://bucket/x", "http://host/x"])
def test_a_uri_of_no_known_kind_is_refused(uri: str) -> None:
    with pytest.raises(SpecError, match="must be s3://bucket/prefix"):
        open_store(uri)
