"""Lines between a supervisor and its agents, and what counts as silence."""

from __future__ import annotations

import time

import pytest

from mxdist.runtime.wire import Silence, hear, order, pack, say, unpack


def test_what_is_said_is_heard() -> None:
    data = bytes(range(256))
    heard = hear(say("append", name="rank-0.log", data=pack(data)).rstrip(b"\n"))

    assert heard is not None
    kind, said = heard
    assert (kind, said["name"], unpack(said["data"])) == ("append", "rank-0.log", data)
    assert order("ping").count(b"\n") == 1


@pytest.mark.parametrize(
    "line", [b"", b"Welcome to node7!", b'{"message": "of another program"}', b'{"mxdist":"torn', b"\xff\xfe"]
)
def test_chatter_is_nobodys_word(line: bytes) -> None:
    assert hear(line) is None


def test_own_absence_is_not_anothers_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    silence, lasted = Silence(), []
    for passed_s, heard in ((1.0, False), (1.0, False), (500.0, False), (1.0, False), (1.0, True), (0.5, False)):
        now += passed_s
        lasted.append(silence.lasts(heard=heard))

    assert lasted == [1.0, 2.0, 4.0, 5.0, 0.0, 0.5], "the 500 s in which nobody asked count as 2"
