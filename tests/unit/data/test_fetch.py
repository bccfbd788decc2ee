"""Fetching: every byte verified, one cache for all processes of a host, damage named or healed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.data.conftest import Place, content, finished
from unit.data.spy import Requests

from mxdist.data.manifest import File as ManifestFile
from mxdist.data.manifest import version_of
from mxdist.errors import DataError

Fill = Callable[..., Path]
FILES = {"train/a.bin": b"first file", "train/b.bin": b"second file", "empty": b""}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def expected(files: dict[str, bytes]) -> dict[str, str]:
    return {path: sha(data) for path, data in files.items()}


@pytest.mark.parametrize("size", [0, 1, (4 << 20) + 1, 9 << 20, 70 << 20])
def test_files_of_every_size_come_back(s3: Place, fill: Fill, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    folder = s3.fetch(s3.stage(fill({"file": data})), tmp_path / "cache")
    assert content(folder) == {"file": sha(data)}


def test_a_second_fetch_reads_the_manifest_alone(s3: Place, fill: Fill, tmp_path: Path, requests: Requests) -> None:
    staged = s3.stage(fill(FILES))
    folder = s3.fetch(staged, tmp_path / "cache")
    requests.clear()
    assert s3.fetch(staged, tmp_path / "cache") == folder
    assert [path.rpartition("/")[2] for _, path in requests.seen] == [f"{staged['version']}.json"]


def test_a_new_version_fetches_only_what_is_new(s3: Place, fill: Fill, tmp_path: Path, requests: Requests) -> None:
    source = fill(FILES)
    s3.fetch(s3.stage(source), tmp_path / "cache")
    (source / "train/b.bin").write_bytes(b"changed")
    second = s3.stage(source)
    requests.clear()
    folder = s3.fetch(second, tmp_path / "cache")
    assert [path.rpartition("/")[2] for path in requests.paths("GET", "/blobs/")] == [sha(b"changed")]
    assert content(folder) == expected({**FILES, "train/b.bin": b"changed"})


@pytest.mark.parametrize("size", [11, 5 << 20], ids=["small", "large"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("flipped", r"is damaged in the store"),
        ("truncated", r"has \d+ bytes in the store instead of \d+"),
        ("longer", r"has \d+ bytes in the store instead of \d+"),
        ("missing", r"is missing from the store"),
    ],
)
def test_a_damaged_object_is_named(place: Place, fill: Fill, tmp_path: Path, damage: str, said: str, size: int) -> None:
    data = b"x" * size
    staged = place.stage(fill({**FILES, "train/bad.bin": data}))
    key, store = f"blobs/{sha(data)}", place.store()
    spoilt = {"flipped": b"x" * (size - 1) + b"y", "truncated": data[:-1], "longer": data + b"x"}
    store.delete([key])
    if damage != "missing":
        store.write(key, spoilt[damage])
    with pytest.raises(DataError, match=rf"^train/bad\.bin of dataset data {said}") as caught:
        place.fetch(staged, tmp_path / "cache")
    assert key in str(caught.value)
    assert not list((tmp_path / "cache" / "versions").rglob("bad.bin"))
    assert not list((tmp_path / "cache" / "blobs").rglob(sha(data)))
    store.write(key, data)
    assert content(place.fetch(staged, tmp_path / "cache")) == expected({**FILES, "train/bad.bin": data})


def test_following_the_hint_repairs_the_store(place: Place, fill: Fill, tmp_path: Path) -> None:
    source = fill(FILES)
    staged = place.stage(source)
    key = f"blobs/{sha(b'first file')}"
    place.store().write(key, b"first fil3")
    with pytest.raises(DataError, match="Stage the same data again with `verify`"):
        place.fetch(staged, tmp_path / "cache")
    assert place.stage(source)["uploaded_files"] == 0, "its size is as it was"
    assert place.stage(source, verify=True)["uploaded_files"] == 1
    assert place.stage(source, verify=True)["uploaded_files"] == 0
    assert content(place.fetch(staged, tmp_path / "cache")) == expected(FILES)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone", "link", "folder", "blob gone", "all blobs gone"])
def test_a_damaged_cache_heals(place: Place, fill: Fill, tmp_path: Path, damage: str) -> None:
    staged = place.stage(fill(FILES))
    cache = tmp_path / "cache"
    file = place.fetch(staged, cache) / "train/a.bin"
    blob = next((cache / "blobs").rglob(sha(b"first file")))
    file.chmod(0o644)
    if damage == "flipped":
        with file.open("r+b") as stream:  # in place: the blob is the same inode
            stream.write(b"F")
    elif damage == "truncated":
        os.truncate(file, 3)
    elif damage == "blob gone":
        blob.unlink()
        file.unlink()
    elif damage == "all blobs gone":
        shutil.rmtree(cache / "blobs")
    else:
        file.unlink()
        if damage == "link":
            (tmp_path / "elsewhere").write_bytes(b"first file")
            file.symlink_to(tmp_path / "elsewhere")
        if damage == "folder":
            file.mkdir()
            (file / "inside").write_bytes(b"x")
    assert content(place.fetch(staged, cache)) == expected(FILES)
    assert not file.is_symlink()


def test_what_a_version_does_not_name_is_removed(place: Place, fill: Fill, tmp_path: Path) -> None:
    staged = place.stage(fill(FILES))
    folder = place.fetch(staged, tmp_path / "cache")
    (folder / "train" / "stranger").write_bytes(b"x")
    (folder / "more").mkdir()
    (folder / "more" / "stranger").write_bytes(b"x")
    (folder / "away").symlink_to(tmp_path, target_is_directory=True)
    assert content(place.fetch(staged, tmp_path / "cache")) == expected(FILES)
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "train"]
    assert (tmp_path / "cache").is_dir()


def test_a_folder_replaced_by_a_link_is_not_written_through(place: Place, fill: Fill, tmp_path: Path) -> None:
    staged = place.stage(fill(FILES))
    folder = place.fetch(staged, tmp_path / "cache")
    shutil.rmtree(folder / "train")
    (tmp_path / "victim").mkdir()
    (folder / "train").symlink_to(tmp_path / "victim", target_is_directory=True)
    assert content(place.fetch(staged, tmp_path / "cache")) == expected(FILES)
    assert list((tmp_path / "victim").iterdir()) == []


def test_processes_share_one_cache(s3: Place, fill: Fill, tmp_path: Path) -> None:
    files = {f"{number}.bin": b"%d " % number + bytes(20_000) for number in range(200)}
    staged = s3.stage(fill(files))
    order = {"do": "fetch", "cache": str(tmp_path / "cache")}
    named = {"manifest_uri": staged["manifest_uri"], "version": staged["version"]}
    answers = [finished(process) for process in [s3.process(**order, **named) for _ in range(4)]]
    read = [path for answer in answers for method, path in answer["requests"] if "/blobs/" in path]
    assert len(read) == len(set(read)) == 200
    assert {answer["answer"] for answer in answers} == {str(tmp_path / "cache" / "versions" / staged["version"])}
    assert content(Path(answers[0]["answer"])) == expected(files)


def test_a_killed_fetch_goes_on(s3: Place, fill: Fill, tmp_path: Path) -> None:
    files = {f"{number}.bin": b"%d " % number + bytes(50_000) for number in range(600)}
    staged = s3.stage(fill(files))
    named = {"manifest_uri": staged["manifest_uri"], "version": staged["version"]}
    cache = tmp_path / "cache"
    process = s3.process(do="fetch", cache=str(cache), **named)
    _wait_until(lambda: len(list((cache / "blobs").glob("*/*"))) >= 50, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    there = len(list((cache / "blobs").glob("*/*")))
    second = finished(s3.process(do="fetch", cache=str(cache), **named))
    assert len([path for _, path in second["requests"] if "/blobs/" in path]) == 600 - there
    assert content(Path(second["answer"])) == expected(files)
    assert list((cache / "partial").iterdir()) == []


def _wait_until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_fetch_waits_for_the_lock(s3: Place, fill: Fill, tmp_path: Path) -> None:
    staged = s3.stage(fill(FILES))
    named = {"manifest_uri": staged["manifest_uri"], "version": staged["version"]}
    lock = tmp_path / "cache" / "locks" / f"{staged['version']}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = s3.process(do="fetch", cache=str(tmp_path / "cache"), **named)
        _wait_until(lambda: "-> FLOCK" in _locks(process.pid), process)
        assert not (tmp_path / "cache" / "versions").exists()
    assert content(Path(finished(process)["answer"])) == expected(FILES)


def _locks(pid: int) -> str:
    lines = Path("/proc/locks").read_text().splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if f" {pid} " in line)


def test_a_session_verifies_once(place: Place, fill: Fill, tmp_path: Path) -> None:
    staged = place.stage(fill(FILES))
    folder = place.fetch(staged, tmp_path / "cache", session="world 1")
    (folder / "train/a.bin").unlink()
    place.fetch(staged, tmp_path / "cache", session="world 1")
    assert not (folder / "train/a.bin").exists()
    place.fetch(staged, tmp_path / "cache", session="world 2")
    assert content(folder) == expected(FILES)


def _publish(place: Place, paths: list[str]) -> dict[str, str]:
    """Publish a manifest as an attacker would: with the right digest over wrong paths."""
    digest = sha(b"payload")
    place.store().write(f"blobs/{digest}", b"payload")
    version = version_of([ManifestFile(path, 7, digest) for path in paths])
    files = [{"path": path, "size": 7, "sha256": digest} for path in paths]
    document = {"format": 1, "name": "data", "version": version, "as_of": "2026-12-01T00:00:00+00:00", "files": files}
    place.store().write_json(f"manifests/{version}.json", document)
    return {"version": version, "manifest_uri": f"{place.store().uri}/manifests/{version}.json"}


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["../evil"], "leads out"),
        (["x/../../evil"], "leads out"),
        (["ok", "a/.."], "leads out"),
        (["/etc/evil"], "is absolute"),
        (["a\0b"], "holds a NUL"),
        (["a", "a/b"], "both a file and a folder"),
        (["a/b", "a/b/c/d"], "both a file and a folder"),
        (["a//b"], "has an empty part"),
        (["a/b", "a//b"], "has an empty part"),
        (["./a"], "has an empty part"),
        (["a/"], "has an empty part"),
        ([""], "has an empty part"),
        (["A", "a"], "differ only in case"),
        (["Dir/a", "dir/b"], "differ only in case"),
        (["a", "a"], "is there twice"),
        (["x" * 256], "longer than 255 bytes"),
        (["ä" * 128], "longer than 255 bytes"),
    ],
)
def test_key_tricks_are_refused_before_the_first_byte(
    s3: Place, tmp_path: Path, requests: Requests, paths: list[str], said: str
) -> None:
    """peak/s5cmd#872, soto-s3-file-transfer#17, runai-model-streamer#183."""
    named = _publish(s3, paths)
    requests.clear()
    with pytest.raises(DataError, match=said):
        s3.fetch(named, tmp_path / "node" / "cache")
    assert requests.paths("GET", "/blobs/") == []
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize("paths", [["a..b"], ["..a/b.."], ["x" * 255], ["a", "b/a"], [" "]])
def test_odd_but_legal_names_are_taken(place: Place, tmp_path: Path, paths: list[str]) -> None:
    folder = place.fetch(_publish(place, paths), tmp_path / "cache")
    assert sorted(content(folder)) == sorted(paths)


def test_a_changed_manifest_is_refused(place: Place, fill: Fill, tmp_path: Path) -> None:
    staged = place.stage(fill(FILES))
    key = f"manifests/{staged['version']}.json"
    document = place.store().read_json(key)
    document["files"][0]["sha256"] = sha(b"other")
    place.store().write_json(key, document)
    with pytest.raises(DataError, match="was changed"):
        place.fetch(staged, tmp_path / "cache")


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"format": 2},
        {"format": 1, "name": "data", "version": "v", "as_of": "d", "files": [{"path": "a"}]},
        "text",
    ],
)
def test_what_is_no_manifest_is_refused(place: Place, tmp_path: Path, document: Any) -> None:
    version = "0" * 64
    place.store().write_json(f"manifests/{version}.json", document)
    uri = f"{place.store().uri}/manifests/{version}.json"
    with pytest.raises(DataError, match=f"{version}.json "):
        place.fetch({"manifest_uri": uri, "version": version}, tmp_path / "cache")


def test_a_missing_dataset_is_said(place: Place, tmp_path: Path) -> None:
    uri = f"{place.store().uri}/manifests/{'0' * 64}.json"
    with pytest.raises(DataError, match=f"there is no dataset at {uri}"):
        place.fetch({"manifest_uri": uri, "version": "0" * 64}, tmp_path / "cache")


@pytest.mark.parametrize("uri", ["{uri}", "{uri}/manifests/other.json", "/manifests/{version}.json", "nonsense"])
def test_a_uri_that_is_no_manifests_is_said(place: Place, fill: Fill, tmp_path: Path, uri: str) -> None:
    staged = place.stage(fill(FILES))
    wrong = uri.format(uri=place.store().uri, version=staged["version"])
    with pytest.raises(DataError, match="is not the manifest of version"):
        place.fetch({"manifest_uri": wrong, "version": staged["version"]}, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_said(place: Place, fill: Fill, tmp_path: Path) -> None:
    staged = place.stage(fill(FILES))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="cannot use the cache .*: Not a directory"):
        place.fetch(staged, tmp_path / "file" / "cache")


def test_too_little_space_is_said_before_the_first_byte(
    s3: Place, fill: Fill, tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = s3.stage(fill(FILES))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    requests.clear()
    with pytest.raises(DataError, match="where 1 MiB are free"):
        s3.fetch(staged, tmp_path / "cache")
    assert requests.paths("GET", "/blobs/") == []
