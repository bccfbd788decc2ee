"""The journal's copy in the run store makes whole what a power loss took from the journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from unit.tracking.conftest import train

from mxdist.store import Attempt
from mxdist.tracking.journal import JournalReader, JournalWriter
from mxdist.tracking.mirror import Mirror, restore
from mxdist.tracking.points import Sieve, mirrored, points


@pytest.fixture
def attempt(claim: Callable[..., Attempt], make_job: Callable[..., object]) -> Attempt:
    return claim(make_job(None))


def steps_in_the_store(attempt: Attempt) -> list[int]:
    found = points(Sieve(), attempt.number, mirrored(attempt))
    return [point.step for point in found if point.key == "loss"]


def cut(journal: Path, at: int) -> bytes:
    return b"".join(journal.read_bytes().splitlines(keepends=True)[:at])


def zeros_within(journal: Path) -> bytes:
    data = journal.read_bytes()
    return data[:500] + bytes(300) + data[800:]


LOSSES: dict[str, Callable[[Path], bytes]] = {
    "its end": lambda journal: cut(journal, 100),
    "half a line": lambda journal: cut(journal, 100) + b'{"n":101,"ses',
    "zeros at its end": lambda journal: cut(journal, 100) + bytes(4096),
    "zeros within": zeros_within,
    "everything": lambda journal: b"",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_power_loss_took_comes_back(attempt: Attempt, journal: Path, loss: str) -> None:
    train(journal, range(1, 61))
    whole = journal.read_bytes()
    Mirror(attempt, journal).catch_up()
    journal.write_bytes(LOSSES[loss](journal))
    assert restore(attempt, journal)
    assert journal.read_bytes() == whole
    train(journal, range(46, 81))  # from the checkpoint of step 45
    Mirror(attempt, journal).catch_up()
    assert steps_in_the_store(attempt) == list(range(1, 81))
    numbers = [record.n for record in mirrored(attempt)]
    assert numbers == [record.n for record in JournalReader(journal).read()] == list(range(1, 2 * 95 + 1))


def test_a_disk_that_takes_no_copy_is_no_reason_to_die(
    attempt: Attempt, journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(journal, range(1, 61))
    Mirror(attempt, journal).catch_up()
    left = cut(journal, 100)
    journal.write_bytes(left)
    journal.with_name(f".{journal.name}.partial").mkdir()
    assert not restore(attempt, journal)
    assert journal.read_bytes() == left
    assert "cannot be made whole" in caplog.text


@pytest.mark.parametrize("tail", [b"", b'{"n":181,"ses', bytes(4096)], ids=["whole", "half a line", "zeros"])
def test_a_journal_that_is_ahead_of_its_copy_stays(attempt: Attempt, journal: Path, tail: bytes) -> None:
    train(journal, range(1, 61))
    Mirror(attempt, journal).catch_up()
    train(journal, range(61, 91))
    before = journal.read_bytes() + tail
    journal.write_bytes(before)
    assert not restore(attempt, journal)
    assert journal.read_bytes() == before


def test_what_only_the_journal_has_stays_in_it(attempt: Attempt, journal: Path) -> None:
    train(journal, range(1, 61))
    Mirror(attempt, journal).catch_up()
    train(journal, range(61, 91))
    whole = journal.read_bytes()
    journal.write_bytes(zeros_within(journal))
    assert restore(attempt, journal)
    assert journal.read_bytes() == whole


def test_nothing_is_made_of_no_copy(attempt: Attempt, journal: Path) -> None:
    assert not restore(attempt, journal)
    assert not journal.exists()
    JournalWriter(journal).append({"loss": 1.0}, step=1)
    assert not restore(attempt, journal)
