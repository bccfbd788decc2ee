"""Whom to blame, on logs as Horovod really writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxdist.runtime.blame import Exit, first_failure, judge, missing_ranks
from mxdist.runtime.watch import Words

SHUT_DOWN = b"MXNetError: Horovod has been shut down. This was caused by an exception on one of the ranks"
STALLED = b"""
[2026-12-02 03:16:19.370470: E horovod/common/stall_inspector.cc:105] One or more tensors were submitted to be reduced,
Missing ranks:
0: [horovod_allreduce.other]
2!: [horovod_allreduce.gradient, horovod_allreduce.bias]
One or more rank (marked by "!") is stalled for longer than 6 seconds. Will shutdown.
"""
WARNED = b"""[2026-12-02 03:16:19.370470: W horovod/common/stall_inspector.cc:107] One or more tensors were submitted
Missing ranks:
1: [horovod_allreduce.gradient]
"""


def test_victim_that_exits_first_is_not_blamed() -> None:
    victim, culprit = Exit(0, 1, 1.0, SHUT_DOWN), Exit(1, 3, 2.0, b"ValueError: no")

    assert first_failure([victim, culprit]) is culprit


def test_first_of_two_that_fail_on_their_own_is_blamed() -> None:
    early, late = Exit(3, 1, 1.0, b""), Exit(0, 1, 2.0, b"")

    assert first_failure([late, early]) is early


def test_nobody_is_blamed_for_success() -> None:
    assert first_failure([Exit(0, 0, 1.0, SHUT_DOWN)]) is None


@pytest.mark.parametrize(
    ("code", "error", "kind", "retryable", "restart"),
    [
        (81, {"kind": "user_error", "message": "bad shape"}, "user_error", False, False),
        (81, {"kind": "data", "message": "a byte is wrong"}, "data", False, False),
        (81, {"kind": "SomethingNew", "message": "x"}, "user_error", False, False),
        (83, {"kind": "rank_exit", "message": "lost the network"}, "rank_exit", True, True),
        (84, None, "nonfinite", False, False),
        (82, None, "rank_exit", True, False),
        (3, None, "rank_exit", True, False),
        (-9, None, "rank_exit", True, True),
        (-64, None, "rank_exit", True, True),
    ],
)
def test_meaning_of_exit_codes(
    code: int, error: dict[str, str] | None, kind: str, retryable: bool, restart: bool
) -> None:
    one = Exit(1, code, 1.0, b"last words\n", error, host="there")
    failure = judge(one, [one])

    assert (failure.cause.kind, failure.cause.retryable, failure.restart) == (kind, retryable, restart)
    assert (failure.cause.rank, failure.cause.host, failure.cause.exit_code) == (1, "there", code)
    assert error is None or error["message"] in failure.cause.message


def test_rank_that_horovod_missed_is_blamed_for_the_exit_of_another() -> None:
    one = Exit(0, 1, 1.0, STALLED + SHUT_DOWN)
    failure = judge(one, [one])

    assert (failure.cause.kind, failure.cause.rank, failure.restart) == ("stall", 2, True)


def test_warning_that_was_overcome_does_not_explain_an_exit() -> None:
    one = Exit(0, 3, 1.0, WARNED + b"ValueError: no\n")

    assert judge(one, [one]).cause.kind == "rank_exit"


def test_rank_that_was_missed_is_blamed_with_its_own_host() -> None:
    first = Exit(0, 1, 1.0, STALLED + SHUT_DOWN, host="node1")
    failure = judge(first, [first, Exit(2, 0, 0.5, b"", host="node2")])

    assert (failure.cause.rank, failure.cause.host) == (2, "node2")


def test_old_warnings_name_nobody_whatever_the_clock_of_their_host(tmp_path: Path) -> None:
    log, words = tmp_path / "rank-0.log", Words()
    log.write_bytes(WARNED)
    words.look(log, 100.0)
    log.write_bytes(WARNED + b"going on\n")
    words.look(log, 200.0)

    assert words.named(100.0) == [1]
    assert words.named(100.1) == [], "it was said before, and what came since is no warning"
    log.write_bytes(WARNED + WARNED.replace(b"19.37", b"59.37").replace(b"1: [", b"0: ["))
    words.look(log, 300.0)
    assert words.named(250.0) == [0]
    assert missing_ranks(b"nothing of the kind") == []


@pytest.mark.parametrize("at", [0.5, 1.5], ids=["before", "after"])
def test_rank_that_ended_well_is_named_when_the_others_only_missed_it(at: float) -> None:
    victim, early = Exit(0, 1, 1.0, SHUT_DOWN), Exit(1, 0, at, b"")
    cause = judge(victim, [victim, early]).cause

    assert (cause.kind, cause.rank, cause.exit_code) == ("rank_exit", 1, 0)
    assert cause.message.startswith("rank 1 ended with code 0 while others still needed it (rank 0 exited with code 1")


def test_rank_that_ended_well_is_not_named_when_another_failed_on_its_own() -> None:
    culprit, early = Exit(0, 3, 1.0, b"ValueError: no"), Exit(1, 0, 0.5, b"")

    assert judge(culprit, [culprit, early]).cause.rank == 0
