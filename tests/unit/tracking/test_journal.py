"""The journal survives what processes and disks do to it."""

from __future__ import annotations

import json
import math
import resource
import time
from pathlib import Path

import pytest

from mxdist.tracking.journal import JournalReader, JournalWriter, last_number


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job" / "journal.jsonl"


def test_each_metric_is_one_line(path: Path) -> None:
    before = time.time_ns() // 1_000_000
    JournalWriter(path).append({"loss": 0.5, "accuracy": 0.25}, step=12, epoch=1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = [line.pop("time_ms") for line in lines]
    assert lines == [
        {"n": 1, "session": 1, "key": "loss", "value": 0.5, "step": 12, "epoch": 1},
        {"n": 2, "session": 1, "key": "accuracy", "value": 0.25, "step": 12, "epoch": 1},
    ]
    assert before <= times[0] == times[1] <= time.time_ns() // 1_000_000


def test_values_that_are_not_finite_are_still_json(path: Path) -> None:
    JournalWriter(path).append({"a": math.nan, "b": math.inf, "c": -math.inf}, step=1)
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    assert [(r.value, r.nonfinite) for r in JournalReader(path).read()] == [
        (None, "nan"),
        (None, "inf"),
        (None, "-inf"),
    ]


def test_the_next_writer_goes_on_in_a_new_session(path: Path) -> None:
    JournalWriter(path).append({"loss": 1.0}, step=1)
    JournalWriter(path).append({"loss": 2.0}, step=1)
    assert [(r.n, r.session) for r in JournalReader(path).read()] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_torn_last_line_is_cut_off(path: Path, cut: int) -> None:
    JournalWriter(path).append({"loss": 1.0, "accuracy": 2.0}, step=1)
    path.write_bytes(path.read_bytes()[:-cut])
    writer = JournalWriter(path)
    writer.append({"loss": 3.0}, step=2)
    assert [(r.n, r.value) for r in JournalReader(path).read()] == [(1, 1.0), (2, 3.0)]


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\0\n\0\n", b"{}\n", b"[1]\n", b'{"n": "x"}\n', b"x" * 200_000])
def test_what_a_crash_of_the_host_leaves_is_cut_off(path: Path, tail: bytes) -> None:
    JournalWriter(path).append({"loss": 1.0}, step=1)
    with path.open("ab") as file:
        file.write(tail)
    assert last_number(path) == 1
    JournalWriter(path).append({"loss": 3.0}, step=2)
    assert [(r.n, r.value) for r in JournalReader(path).read()] == [(1, 1.0), (2, 3.0)]


def test_a_reader_sees_only_complete_lines_and_each_once(path: Path) -> None:
    reader = JournalReader(path)
    assert reader.read() == []
    writer = JournalWriter(path)
    writer.append({"loss": 1.0}, step=1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:10])
    assert [r.n for r in reader.read()] == [1]
    assert reader.read() == []
    path.write_bytes(whole + whole.replace(b'"n":1', b'"n":2'))
    assert [r.n for r in reader.read()] == [2]


def test_a_reader_can_be_given_a_limit(path: Path) -> None:
    writer = JournalWriter(path)
    for step in range(5):
        writer.append({"loss": 1.0}, step=step)
    reader = JournalReader(path)
    assert [[r.step for r in reader.read(2)] for _ in range(4)] == [[0, 1], [2, 3], [4], []]


def test_last_number_of_no_journal_is_zero(path: Path) -> None:
    assert last_number(path) == 0
    JournalWriter(path)
    assert last_number(path) == 0


@pytest.mark.parametrize("value", [None, "high", [1]], ids=str)
def test_a_value_that_is_no_number_costs_itself_only(path: Path, value: object) -> None:
    JournalWriter(path).append({"odd": value, "loss": 0.5}, step=1)  # type: ignore[dict-item]
    assert [(r.n, r.key) for r in JournalReader(path).read()] == [(1, "loss")]


def test_a_full_disk_does_not_raise_and_leaves_no_torn_line(path: Path) -> None:
    writer = JournalWriter(path)
    writer.append({"loss": 1.0}, step=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        writer.append({"loss": 2.0}, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    writer.append({"loss": 3.0}, step=3)
    assert [(r.n, r.step) for r in JournalReader(path).read()] == [(1, 1), (2, 3)]
