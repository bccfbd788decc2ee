"""Pruning: only what manifests of ours name, never under a staging, never more than was asked for."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError
from unit.data.conftest import Place, content

import mxdist.data.prune as pruning
from mxdist.errors import DataError, StoreError
from mxdist.spec import JobState, parse_job
from mxdist.store import Attempt, JobRun, Result
from mxdist.store.run import INDEX
from support.share import sicken

Fill = Callable[..., Path]


def blob(data: bytes) -> str:
    return f"blobs/{hashlib.sha256(data).hexdigest()}"


@pytest.fixture
def three(place: Place, fill: Fill) -> list[str]:
    """Three versions, oldest first: each has a file of its own and one that all share."""
    versions = []
    for day in (1, 2, 3):
        source = fill({"own": b"own %d" % day, "shared": b"shared"}, f"day{day}")
        versions.append(place.stage(source, as_of=f"2026-12-0{day}")["version"])
    return versions


def test_a_dry_run_says_and_deletes_nothing(place: Place, three: list[str]) -> None:
    before = place.keys()
    assert place.prune(keep=1, dry_run=True) == {
        "dry_run": True,
        "versions": sorted(three[:2]),
        "blobs": 2,
        "bytes": 10,
    }
    assert place.keys() == before


def test_the_dry_run_is_the_default(place: Place, three: list[str]) -> None:
    before = place.keys()
    answer = pruning.prune(
        place.uri, "data", keep=2, runs_uri=None, storage=place.storage, credentials=place.credentials
    )
    assert answer["dry_run"]
    assert place.keys() == before


def test_old_versions_and_their_own_blobs_go(place: Place, three: list[str], tmp_path: Path) -> None:
    newest = place.dataset().load(three[2])
    pruned = place.prune(keep=1)
    assert (sorted(pruned["versions"]), pruned["blobs"], pruned["bytes"]) == (sorted(three[:2]), 2, 10)
    assert place.keys(prefix="manifests/") == [f"manifests/{three[2]}.json"]
    assert place.keys(prefix="blobs/") == sorted([blob(b"own 3"), blob(b"shared")])
    assert place.dataset().history() == [{"version": three[2], "as_of": "2026-12-03T00:00:00+00:00"}]
    assert place.keys(prefix="pruning/") == []
    assert newest is not None
    folder = place.fetch({"manifest_uri": place.dataset().manifest_uri(three[2]), "version": three[2]}, tmp_path / "c")
    assert set(content(folder)) == {"own", "shared"}


def test_what_no_manifest_names_stays(place: Place, three: list[str]) -> None:
    strangers = {
        "blobs/stranger": b"x",
        blob(b"of a killed staging"): b"x",
        "README": b"x",
        "manifests/notes.txt": b"x",
    }
    for key, data in strangers.items():
        place.store().write(key, data)
    place.prune(keep=1)
    assert set(strangers) <= set(place.keys())


def test_protected_versions_stay(place: Place, three: list[str]) -> None:
    assert place.prune(keep=1, protect=[three[0]])["versions"] == [three[1]]
    assert set(place.dataset().versions()) == {three[0], three[2]}


def claimed(place: Place, key: str, version: str, *, after: int = 0, kind: str = "training") -> Attempt:
    """Submit a job on a version, as far as the run store knows."""
    dataset = {"manifest_uri": place.dataset().manifest_uri(version), "version": version}
    what = {"model": {"name": "mlp"}} if kind == "training" else {"models": {"challenger": "s3://b/m"}}
    place.runs().create_json(f"{INDEX}/{key}", {"job_key": key})
    job = parse_job({"kind": kind, "name": "train", "dataset": dataset, **what})
    return JobRun(place.runs(), key).claim(job, after=after)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_versions_of_running_jobs_stay(place: Place, three: list[str], kind: str, dry_run: bool) -> None:
    claimed(place, "running", three[0], kind=kind)
    place.runs().create_json(f"{INDEX}/indexed-only", {"job_key": "indexed-only"})
    assert place.prune(keep=1, dry_run=dry_run)["versions"] == [three[1]]
    assert blob(b"own 1") in place.keys()
    assert three[0] in place.dataset().versions()


@pytest.mark.parametrize(
    ("end", "stays"),
    [(JobState.SUCCEEDED, False), (JobState.FAILED, False), (JobState.PREEMPTED, True)],
    ids=["done", "failed", "waits to go on"],
)
def test_versions_of_jobs_that_are_over_go(place: Place, three: list[str], end: JobState, stays: bool) -> None:
    attempt = claimed(place, "over", three[0])
    attempt.finish(Result(end, 1.0))
    assert (three[0] not in place.prune(keep=1, dry_run=True)["versions"]) is stays
    if stays:
        attempt.give_up("user", "not needed")
        assert three[0] in place.prune(keep=1, dry_run=True)["versions"]


def test_the_attempt_that_counts_says_what_a_job_needs(place: Place, three: list[str]) -> None:
    claimed(place, "cleared", three[0]).finish(Result(JobState.CANCELLED, 1.0))
    claimed(place, "cleared", three[1], after=1)
    assert place.prune(keep=1)["versions"] == [three[0]]


def test_a_claim_that_cannot_be_read_stops_it(place: Place, three: list[str]) -> None:
    claimed(place, "broken", three[0])
    place.runs().write("broken/attempts/0000000001.json", b"{")
    before = place.keys()
    with pytest.raises(StoreError, match="is not JSON"):
        place.prune(keep=1)
    assert place.keys() == before


def test_age_is_decided_by_the_data_not_by_the_staging(place: Place, three: list[str], fill: Fill) -> None:
    late = place.stage(fill({"own": b"late"}, "late"), as_of="2026-11-01")["version"]
    current = place.stage(fill({"own": b"own 3", "shared": b"shared"}, "day3"), as_of="2026-12-04")["version"]
    assert current == three[2]
    assert set(place.prune(keep=3)["versions"]) == {late}


def test_the_version_staged_last_stays_even_if_its_data_are_old(place: Place, three: list[str], fill: Fill) -> None:
    late = place.stage(fill({"own": b"late"}, "late"), as_of="2026-11-01")["version"]
    place.prune(keep=1)
    assert set(place.dataset().versions()) == {late, three[2]}


def test_nothing_to_prune_is_no_error(place: Place, three: list[str]) -> None:
    assert place.prune(keep=3) == {"dry_run": False, "versions": [], "blobs": 0, "bytes": 0}
    assert place.prune("never-staged", keep=3)["versions"] == []
    assert place.keys("never-staged") == []


@pytest.mark.parametrize("keep", [0, -1])
def test_nobody_can_prune_everything(place: Place, three: list[str], keep: int) -> None:
    with pytest.raises(DataError, match="at least 1"):
        place.prune(keep=keep)


def test_more_than_the_share_is_refused(place: Place, three: list[str]) -> None:
    before = place.keys()
    with pytest.raises(DataError, match=r"would delete 2 of 3 versions.*max_share 0\.5"):
        place.prune(keep=1, max_share=0.5)
    assert place.keys() == before


def test_a_manifest_that_is_not_ours_stops_it(place: Place, three: list[str]) -> None:
    place.store().write_json(f"manifests/{'0' * 64}.json", {"format": 1, "files": []})
    before = place.keys()
    with pytest.raises(DataError, match="is not a manifest of mxdist"):
        place.prune(keep=1)
    assert place.keys() == before


def break_off(monkeypatch: pytest.MonkeyPatch, place: Place, prefix: str) -> None:
    """Make listings of ``prefix`` fail: in a folder at once, on S3 on the last page."""
    if place.endpoint_url is None:
        sicken(monkeypatch, Path(place.uri, "runs" if prefix == "_jobs/" else "data", prefix), "list")
        return
    real = BaseClient._make_api_call

    def call(self: BaseClient, name: str, params: dict[str, Any]) -> Any:
        if name != "ListObjectsV2" or not params["Prefix"].endswith(prefix):
            return real(self, name, params)
        page = real(self, name, {**params, "MaxKeys": 1})
        if not page["IsTruncated"]:
            raise ClientError({"Error": {"Code": "InternalError", "Message": "broke off"}}, name)
        return page

    monkeypatch.setattr(BaseClient, "_make_api_call", call)


@pytest.mark.parametrize("prefix", ["manifests/", "history/", "staging/", "_jobs/"])
def test_a_listing_that_breaks_off_stops_it(
    place: Place, three: list[str], monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """A listing that fails on its second page once made tools delete what they had not seen: aws/aws-cli#1481."""
    before = place.keys()
    with monkeypatch.context() as patch:
        break_off(patch, place, prefix)
        with pytest.raises(StoreError, match="cannot list"):
            place.prune(keep=1)
    assert place.keys() == before


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT], ids=["stale", "as if unmounted"])
@pytest.mark.parametrize("broken", ["list", "open"])
@pytest.mark.parametrize("after", range(5))
def test_a_share_that_is_lost_meanwhile_costs_no_blob_of_a_version(
    tmp_path: Path, fill: Fill, monkeypatch: pytest.MonkeyPatch, code: int, broken: str, after: int
) -> None:
    place = Place(str(tmp_path / "store"))
    for day in (1, 2, 3):
        place.stage(fill({"own": b"own %d" % day, "shared": b"shared"}, f"day{day}"), as_of=f"2026-12-0{day}")
    with monkeypatch.context() as patch, suppress(StoreError):
        sicken(patch, Path(place.uri, "data", "manifests"), broken, code=code, after=after)
        place.prune(keep=2)
    live, stored = place.dataset().versions(), place.dataset().blobs()
    assert len(live) >= 2
    for version in live:
        manifest = place.dataset().load(version)
        assert manifest is not None
        assert {file.sha256 for file in manifest.files} <= stored.keys()


def test_a_prune_under_a_staging_gives_up(place: Place, three: list[str]) -> None:
    before = place.keys()
    with pruning.announced(place.dataset()):
        with pytest.raises(DataError, match="a staging of .* is under way") as caught:
            place.prune(keep=1)
    assert caught.value.retryable
    assert place.keys() == before


def test_a_staging_that_was_killed_yesterday_does_not_count(place: Place, three: list[str]) -> None:
    old = {"at": time.time() - 90_000, "host": "h", "pid": 1}
    place.store().write_json("staging/old.json", old)
    assert len(place.prune(keep=1)["versions"]) == 2
    assert place.keys(prefix="staging/") == []


def test_a_staging_waits_for_a_prune(place: Place, three: list[str], fill: Fill) -> None:
    source = fill({"own": b"new", "shared": b"shared"}, "new")
    place.store().write_json("pruning/p.json", {"at": time.time(), "versions": [], "blobs": []})
    answers: list[Any] = []
    staging = threading.Thread(target=lambda: answers.append(place.stage(source)))
    staging.start()
    until = time.monotonic() + 60
    while not place.keys(prefix="staging/"):
        assert time.monotonic() < until
    assert blob(b"new") not in place.keys()
    place.store().delete(["pruning/p.json"])
    staging.join(60)
    assert answers[0]["uploaded_files"] == 1


def test_a_prune_that_never_ends_is_said(place: Place, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_PATIENCE_S", 0.0)
    place.store().write_json("pruning/p.json", {"at": time.time(), "versions": [], "blobs": []})
    with pytest.raises(DataError, match="does not end"):
        place.stage(fill({"a": b"1"}))
    assert place.keys() == ["pruning/p.json"]


@pytest.mark.parametrize("who", ["staging", "prune"])
def test_a_prune_that_was_killed_is_finished(place: Place, three: list[str], fill: Fill, who: str) -> None:
    """Killed after it had deleted the manifest: what it announced is all that still names its blobs."""
    left = {"at": time.time() - 4000, "versions": [three[0]], "blobs": [blob(b"own 1")[6:], blob(b"shared")[6:]]}
    place.store().write_json("pruning/killed.json", left)
    place.store().delete([f"manifests/{three[0]}.json"])
    if who == "staging":
        place.stage(fill({"own": b"4"}, "day4"), as_of="2026-12-04")
    else:
        place.prune(keep=3)
    assert place.keys(prefix="pruning/") == []
    assert blob(b"own 1") not in place.keys()
    assert blob(b"shared") in place.keys()
    assert three[0] not in [entry["version"] for entry in place.dataset().history()]


def test_stagings_and_prunes_at_once_leave_whole_versions(place: Place, fill: Fill, tmp_path: Path) -> None:
    """Two versions alternate over shared blobs while another thread prunes all it can."""
    sources = [fill({"own": b"%d" % turn, "shared": b"shared"}, f"source{turn}") for turn in range(3)]
    done, refused = threading.Event(), list[DataError]()

    def keep_pruning() -> None:
        while not done.is_set():
            try:
                place.prune(keep=1)
            except DataError as error:
                refused.append(error)

    thread = threading.Thread(target=keep_pruning)
    thread.start()
    try:
        for turn in range(6):
            staged = place.stage(sources[turn % 3], as_of=f"2026-12-{turn + 1:02}")
            folder = place.fetch(staged, tmp_path / "caches" / str(turn))
            assert set(content(folder)) == {"own", "shared"}
    finally:
        done.set()
        thread.join(120)
    assert not thread.is_alive()
    assert [str(error) for error in refused if not error.retryable] == []


def test_a_prune_leaves_the_announcement_of_another_alone(place: Place, three: list[str]) -> None:
    """While it stands, no staging relies on blobs that the other is about to delete."""
    place.store().write_json("pruning/other.json", {"at": time.time(), "versions": [], "blobs": []})
    assert len(place.prune(keep=1)["versions"]) == 2
    assert place.keys(prefix="pruning/") == ["pruning/other.json"]
