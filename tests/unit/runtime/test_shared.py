"""Memory that ranks share: what another rank opens must be it."""

from __future__ import annotations

import os

import pytest

from mxdist.runtime.parallel import shared

SIZE = 1 << 16


def made() -> tuple[str, int]:
    descriptor = shared._create(SIZE)
    assert descriptor is not None
    return f"/proc/{os.getpid()}/fd/{descriptor}", descriptor


def test_the_memory_of_rank_0_is_mapped() -> None:
    place, descriptor = made()
    memory = shared._open(place, SIZE, shared._mark(descriptor))
    memory[100] = 7
    assert os.pread(descriptor, 1, 100) == b"\x07"
    os.close(descriptor)


def test_other_memory_is_not_written_to() -> None:
    (_, first), (place, second) = made(), made()
    with pytest.raises(ValueError, match="not the memory of rank 0"):
        shared._open(place, SIZE, shared._mark(first))
    with pytest.raises(ValueError, match=r"mmap length"):
        shared._open(place, 2 * SIZE, shared._mark(second))
    for descriptor in (first, second):
        os.close(descriptor)


def test_a_system_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert shared._create(SIZE) is None
