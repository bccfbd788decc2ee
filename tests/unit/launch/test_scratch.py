"""What a prune of this host deletes, and above all what it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mxdist.data.fetch as fetching
from mxdist import processes
from mxdist.data.fetch import fetch
from mxdist.data.stage import stage
from mxdist.launch.scratch import prune_datasets, prune_scratch
from mxdist.spec import TrainingJob, parse_job
from mxdist.spec.state import JobState
from mxdist.store import Attempt, JobRun, Result, open_store

DAY_S = 86_400.0
WEEK_S = 7 * DAY_S


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


def attempt_in(
    workdir: Path, key: str, *, ended_ago_s: float | None, state: JobState = JobState.SUCCEEDED, after: int = 0
) -> tuple[Attempt, Path]:
    """Make an attempt and its scratch folder, as a launcher leaves them; ``None``: it has not ended."""
    runs = open_store(str(workdir.parent / "runs"))
    job = parse_job({"name": "x", "script": {"path": "train.py"}})
    assert isinstance(job, TrainingJob)
    attempt = JobRun(runs, key).claim(job, after=after)
    if ended_ago_s is not None:
        attempt.finish(Result(state=state, ended_at=time.time() - ended_ago_s))
    folder = workdir / key / f"{after + 1:010d}"
    (folder / "world-1").mkdir(parents=True)
    (folder / "world-1" / "rank-0.log").write_bytes(b"x" * 1000)
    told = {
        "runs_uri": runs.uri,
        "job_key": key,
        "attempt": after + 1,
        "token": attempt.claim.token,
        "storage": job.storage.to_document(),
    }
    (folder / "attempt.json").write_text(json.dumps(told))
    return attempt, folder


def deleted(workdir: Path, **options: bool) -> list[str]:
    found = prune_scratch(workdir, older_than_s=WEEK_S, **options)
    return [str(left.path.relative_to(workdir)) for left in found if not left.kept]


def test_folder_that_a_killed_agent_has_left_goes_too(workdir: Path) -> None:
    _, folder = attempt_in(workdir, "old", ended_ago_s=8 * DAY_S)
    left = folder.rename(folder.with_name(f"{folder.name}@3"))

    assert deleted(workdir) == ["old/0000000001@3"]
    assert not left.exists()


def test_code_that_no_attempt_runs_from_goes(workdir: Path) -> None:
    _, folder = attempt_in(workdir, "new", ended_ago_s=None)
    old, used, lately = (workdir / "code" / (letter * 64) for letter in "abc")
    for code in (old, used, lately, workdir / "code" / "mine"):
        code.mkdir(parents=True)
        (code / "train.py").write_text("pass")
        code.with_name(f"{code.name}.lock").touch()
        if code != lately:
            os.utime(code, (time.time() - 8 * DAY_S,) * 2)
    (folder / "code").symlink_to(used)

    assert deleted(workdir, dry_run=True) == deleted(workdir) == [f"code/{old.name}"]
    names = {path.name for path in (workdir / "code").iterdir()}
    assert names == {code.name + end for code in (used, lately, workdir / "mine") for end in ("", ".lock")}


@pytest.mark.parametrize("state", [state for state in JobState if state.final])
def test_attempts_that_ended_long_ago_go(workdir: Path, state: JobState) -> None:
    _, old = attempt_in(workdir, "old", ended_ago_s=8 * DAY_S, state=state)
    _, new = attempt_in(workdir, "new", ended_ago_s=6 * DAY_S, state=state)

    assert deleted(workdir, dry_run=True) == ["old/0000000001"]
    assert old.exists()
    (left,) = [left for left in prune_scratch(workdir, older_than_s=WEEK_S) if not left.kept]
    assert left.size_bytes == 1000 + (new / "attempt.json").stat().st_size, "both keys have as many letters"
    assert [path.name for path in workdir.iterdir()] == ["new"]
    assert new.exists()


def test_attempt_without_a_result_stays_however_old(workdir: Path) -> None:
    _, running = attempt_in(workdir, "running", ended_ago_s=None)
    os.utime(running, (0, 0))

    assert [left.kept for left in prune_scratch(workdir, older_than_s=0)] == ["it has no result"]
    assert running.exists()


def test_attempt_with_a_living_process_stays(workdir: Path) -> None:
    attempt, folder = attempt_in(workdir, "job", ended_ago_s=8 * DAY_S)
    environment = {**os.environ, processes.TOKEN_NAME: attempt.claim.token}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100000)"], env=environment) as process:
        try:
            assert [left.kept for left in prune_scratch(workdir, older_than_s=WEEK_S)] == ["its processes run"]
        finally:
            process.kill()
    assert folder.exists()
    assert deleted(workdir) == ["job/0000000001"]


def test_attempt_that_the_run_store_does_not_know_stays(workdir: Path) -> None:
    _, folder = attempt_in(workdir, "job", ended_ago_s=8 * DAY_S)
    (workdir.parent / "runs").rename(workdir.parent / "elsewhere")
    (left,) = prune_scratch(workdir, older_than_s=WEEK_S)

    assert "how it ended is not known" in left.kept
    assert folder.exists()


def test_older_attempts_of_a_living_job_go(workdir: Path) -> None:
    attempt_in(workdir, "job", ended_ago_s=8 * DAY_S, state=JobState.FAILED)
    _, newer = attempt_in(workdir, "job", ended_ago_s=None, after=1)

    assert deleted(workdir) == ["job/0000000001"]
    assert [path.name for path in (workdir / "job").iterdir()] == [newer.name]


def test_folders_of_others_stay(workdir: Path) -> None:
    _, folder = attempt_in(workdir, "job", ended_ago_s=8 * DAY_S)
    (workdir / "mine" / "0000000001").mkdir(parents=True)
    moved = workdir / "other" / "0000000001"
    moved.parent.mkdir()
    folder.rename(moved)  # its attempt.json names another place
    (workdir / "torn" / "0000000001").mkdir(parents=True)
    (workdir / "torn" / "0000000001" / "attempt.json").write_text("{")
    outside = workdir.parent / "outside"
    outside.mkdir()
    (outside / "file").touch()

    assert deleted(workdir) == []
    assert moved.exists()


def test_links_are_not_followed(workdir: Path) -> None:
    outside = workdir.parent / "outside"
    outside.mkdir()
    (outside / "file").touch()
    _, folder = attempt_in(workdir, "job", ended_ago_s=8 * DAY_S)
    (folder / "link").symlink_to(outside)

    assert deleted(workdir) == ["job/0000000001"]
    assert (outside / "file").exists()


def test_what_a_killed_prune_left_goes(workdir: Path) -> None:
    (workdir / "job" / ".pruned-1" / "world-1").mkdir(parents=True)
    assert deleted(workdir) == []
    assert list((workdir / "job").iterdir()) == []


@pytest.fixture
def versions(tmp_path: Path, workdir: Path) -> dict[str, Path]:
    """Two cached versions of one dataset; they share a file."""
    made = {}
    for name in ("old", "new"):
        source = tmp_path / name
        source.mkdir()
        (source / "shared.bin").write_bytes(b"s" * 1000)
        (source / "own.bin").write_bytes(name.encode() * 1000)
        staged = stage(str(source), str(tmp_path / "lake"), "digits", as_of="2026-01-01")
        made[name] = fetch(staged["manifest_uri"], staged["version"], workdir / ".datasets", session="world")
    week_ago = time.time() - 8 * DAY_S
    for used in (made["old"], made["old"].with_name(f"{made['old'].name}.session")):
        os.utime(used, (week_ago, week_ago))
    for blob in (workdir / ".datasets").glob("blobs/*/*"):
        os.utime(blob, (week_ago, week_ago))
    return made


def test_dataset_that_nobody_used_for_long_goes_and_leaves_what_others_share(
    workdir: Path, versions: dict[str, Path]
) -> None:
    def contents() -> set[bytes]:
        return {blob.read_bytes()[:3] for blob in (workdir / ".datasets").glob("blobs/*/*")}

    assert contents() == {b"sss", b"old", b"new"}
    assert [left.path for left in prune_datasets(workdir, older_than_s=WEEK_S, dry_run=True) if not left.kept] == [
        versions["old"]
    ]
    assert contents() == {b"sss", b"old", b"new"}
    (left,) = [left for left in prune_datasets(workdir, older_than_s=WEEK_S) if not left.kept]

    assert (left.path, left.size_bytes) == (versions["old"], 3000)
    assert contents() == {b"sss", b"new"}
    assert sorted(path.name for path in versions["new"].iterdir()) == ["own.bin", "shared.bin"]


def test_datasets_stay_while_a_job_is_under_way(workdir: Path, versions: dict[str, Path]) -> None:
    attempt_in(workdir, "running", ended_ago_s=None)
    (left,) = prune_datasets(workdir, older_than_s=WEEK_S)

    assert "is not over" in left.kept
    assert versions["old"].exists()


def staged_in(tmp_path: Path) -> tuple[str, str]:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.bin").write_bytes(b"a" * 1000)
    staged = stage(str(source), str(tmp_path / "lake"), "digits", as_of="2026-01-01")
    return staged["manifest_uri"], staged["version"]


_READER = """
import sys
from pathlib import Path
from mxdist.data.fetch import fetch
fetch(sys.argv[1], sys.argv[2], Path(sys.argv[3]), hold=True)
print("reads", flush=True)
sys.stdin.read()
"""


def test_version_stays_while_a_process_reads_it(tmp_path: Path, workdir: Path) -> None:
    """A reader that belongs to no job, such as that of `plan --estimate`; killed, it holds nothing any more."""
    cache, named = workdir / ".datasets", staged_in(tmp_path)
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, *named, str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert reader.stdout is not None
    assert reader.stdin is not None
    with reader.stdin, reader.stdout:
        assert reader.stdout.readline() == b"reads\n"
        (left,) = prune_datasets(workdir, older_than_s=0)
        assert "reads it" in left.kept
        assert (cache / "versions" / named[1] / "a.bin").exists()
        reader.kill()
        reader.wait(30)
    (left, *_) = prune_datasets(workdir, older_than_s=0)
    assert (left.kept, left.size_bytes) == ("", 1000)
    assert not (cache / "versions" / named[1]).exists()


def test_a_reader_that_ends_leaves_nothing_open(tmp_path: Path, workdir: Path) -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", _READER, *staged_in(tmp_path)]
    done = subprocess.run(
        [*command, str(workdir / ".datasets")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "reads\n", "")


def test_version_that_was_just_asked_for_stays(tmp_path: Path, workdir: Path) -> None:
    named = staged_in(tmp_path)
    folder = fetch(*named, workdir / ".datasets")
    week_ago = time.time() - 8 * DAY_S
    os.utime(folder, (week_ago, week_ago))
    fetch(*named, workdir / ".datasets")
    (left,) = prune_datasets(workdir, older_than_s=WEEK_S)
    assert left.kept == "it was used a short while ago"


def test_contents_stay_while_a_version_is_being_filled(
    tmp_path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch has found an old blob that no version links to, and is about to link it when a prune comes."""
    cache, named = workdir / ".datasets", staged_in(tmp_path)
    shutil.rmtree(fetch(*named, cache))
    (blob,) = cache.glob("blobs/*/*")
    week_ago = time.time() - 8 * DAY_S
    os.utime(blob, (week_ago, week_ago))
    said: list[str] = []
    link = fetching._link

    def late(*paths: Path) -> None:
        said.extend(left.kept for left in prune_datasets(workdir, older_than_s=WEEK_S))
        link(*paths)

    monkeypatch.setattr(fetching, "_link", late)
    folder = fetch(*named, cache)
    assert (folder / "a.bin").read_bytes() == b"a" * 1000
    assert said == ["a process fetches or reads it", "a process fetches a version"]
