"""Reading growing files line by line, in bounded memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mxdist.runtime.logs import MAX_LINE_BYTES, Budget, LogMirror, Tail, clean
from mxdist.spec import parse_job
from mxdist.store import Attempt, JobRun, open_store


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    job = parse_job({"name": "x", "script": {"path": "/a.py"}})
    return JobRun(open_store(str(tmp_path / "runs")), "job").claim(job, after=0)


@pytest.mark.parametrize("seed", range(5))
def test_any_split_of_reads_and_writes_gives_the_same_lines(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    lines = [chance.randbytes(chance.randrange(200)).replace(b"\n", b"") for _ in range(300)]
    data, path = b"\n".join(lines) + b"\n", tmp_path / "log"
    tail, found, offsets = Tail(path), list[str](), list[int]()
    path.touch()
    written = 0
    while written < len(data) or tail.waiting():
        with path.open("ab") as file:
            step = chance.randrange(500)
            file.write(data[written : written + step])
            written += step
        for text, offset in tail.read(chance.randrange(1, 400)):
            found.append(text)
            offsets.append(offset)

    assert found == [clean(line) for line in lines]
    assert offsets == [len(b"\n".join(lines[: count + 1])) + 1 for count in range(len(lines))]


def test_unended_line_waits_for_its_end_or_the_rank_s(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"half")
    tail = Tail(path)

    assert list(tail.read(100)) == []
    assert tail.line_offset == 0
    assert list(tail.read(100, final=True)) == [("half", 4)]
    assert list(tail.read(100, final=True)) == []


def test_endless_line_is_cut_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a" * (5 * MAX_LINE_BYTES) + b"\nnext\n")
    tail = Tail(path)
    found = []
    while tail.waiting():
        found += [text for text, _ in tail.read(MAX_LINE_BYTES)]

    assert [text[:4] for text in found] == ["aaaa", "next"]
    assert found[0].endswith("[the line goes on]")


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"plain", "plain"),
        (b"10%\r20%\r30%", "30%"),
        (b"windows\r", "windows"),
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"a\tb\x00c", "a\tb\ufffdc"),
        ("naïve".encode(), "naïve"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_any_bytes_become_text(raw: bytes, shown: str) -> None:
    assert clean(raw) == shown


def test_budget_bounds_burst_and_sum() -> None:
    budget = Budget(left=3 << 20)
    assert budget.now() == 1 << 20
    budget.spend(1 << 20)
    assert budget.now() < 1 << 19
    budget.left = 10
    assert budget.now() <= 10


def test_mirror_marks_a_gap_and_keeps_the_end(attempt: Attempt, tmp_path: Path) -> None:
    (tmp_path / "world-1").mkdir()
    log = tmp_path / "world-1" / "rank-0.log"
    log.write_bytes(b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 50_000 + b"the end\n")
    mirror = LogMirror(attempt, tmp_path)
    mirror.follow(1, 1)
    mirror.collect()
    mirror.collect(final=True)
    mirror.flush()
    lines = [line for _, chunk in attempt.logs.read() for line in chunk["lines"]]

    assert "bytes left out here; the full log is" in lines[0]
    assert lines[-1] == "[0] the end"
    assert mirror.line_count == len(lines)


def test_second_mirror_goes_on_where_the_first_stopped(attempt: Attempt, tmp_path: Path) -> None:
    (tmp_path / "world-1").mkdir()
    log = tmp_path / "world-1" / "rank-0.log"
    log.write_bytes(b"one\ntw")
    first = LogMirror(attempt, tmp_path)
    first.follow(1, 1)
    first.note("begin")
    first.collect()
    first.flush()
    log.write_bytes(b"one\ntwo\n")
    second = LogMirror(attempt, tmp_path)
    second.resume()
    second.flush()

    chunks = [chunk for _, chunk in attempt.logs.read()]
    assert [line for chunk in chunks for line in chunk["lines"]] == ["[mxdist] begin", "[0] one", "[0] two"]
    assert [chunk["first"] for chunk in chunks] == [1, 3]


def test_world_that_starts_before_the_mirror_resumes_is_read_once(attempt: Attempt, tmp_path: Path) -> None:
    mirror = LogMirror(attempt, tmp_path)
    (tmp_path / "world-1").mkdir()
    (tmp_path / "world-1" / "rank-0.log").write_bytes(b"one\n")
    mirror.resume()
    mirror.follow(1, 1)
    mirror.collect()
    mirror.flush()

    assert [line for _, chunk in attempt.logs.read() for line in chunk["lines"]] == ["[0] one"]


def test_two_writers_never_share_a_number(attempt: Attempt, tmp_path: Path) -> None:
    first, second = LogMirror(attempt, tmp_path), LogMirror(attempt, tmp_path)
    for mirror, text in ((first, "a"), (second, "b"), (first, "c")):
        mirror.note(text)
        mirror.flush()

    chunks = [chunk for _, chunk in attempt.logs.read()]
    assert [(chunk["first"], chunk["lines"]) for chunk in chunks] == [
        (1, ["[mxdist] a"]), (2, ["[mxdist] b"]), (3, ["[mxdist] c"]),
    ]  # fmt: skip
