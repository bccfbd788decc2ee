"""Which policy fits a failure, and which failures no policy is about."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mxdist.runtime.blame import Exit, Failure, judge
from mxdist.runtime.policies import follow
from mxdist.spec import FailurePolicy

LOG = b"step 3\nCUDA: an illegal memory access was encountered\nlast words\n"
FAIL = {"exit_code": 17, "then": "fail"}


def _exit(rank: int | None = 1, *, log: bytes = LOG, code: int = 17) -> Exit:
    return Exit(rank, code, 0.0, log, role="" if rank is not None else "server 0", host=f"node-{rank}")


def _followed(first: Exit, *policies: dict[str, Any]) -> Failure:
    return follow([FailurePolicy.parse(policy) for policy in policies], first, judge(first, [first]))


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"exit_code": 17}, True),
        ({"exit_code": 1}, False),
        ({"pattern": "illegal memory"}, True),
        ({"pattern": "^last"}, True),
        ({"pattern": "out of memory"}, False),
        ({"exit_code": 17, "pattern": "illegal memory"}, True),
        ({"exit_code": 1, "pattern": "illegal memory"}, False),
        ({"exit_code": 17, "pattern": "out of memory"}, False),
    ],
)
def test_both_must_fit_if_both_are_given(fields: dict[str, Any], fits: bool) -> None:
    assert _followed(_exit(), {**fields, "then": "fail"}).by_policy is fits


def test_first_that_fits_counts() -> None:
    found = _followed(_exit(), {"pattern": "nowhere", "then": "fail"}, {"exit_code": 17, "then": "avoid_host"}, FAIL)
    assert (found.restart, found.avoid, found.cause.host, found.cause.retryable) == (True, True, "node-1", True)


def test_pattern_that_takes_for_ever_does_not() -> None:
    slow = {"pattern": r"(\w+\s*)+failed:", "then": "retry"}
    began = time.monotonic()
    found = _followed(_exit(log=b"word " * 3000 + b"\n"), {"pattern": "^word", "then": "fail"}, slow)
    assert not found.cause.retryable, "what was found before it counts"
    assert not _followed(_exit(log=b"word " * 3000), slow, {"pattern": "^word", "then": "fail"}).by_policy
    assert time.monotonic() - began < 60


def test_who_only_lost_a_peer_has_no_policy() -> None:
    lost = _exit(log=b"gloo/transport: Connection reset by peer\n")
    assert not _followed(lost, {"pattern": "Connection reset", "then": "avoid_host"}).by_policy
    assert not _followed(_exit(None), FAIL).by_policy


def test_who_is_blamed_for_the_exit_of_another_has_no_policy() -> None:
    first = _exit(0)
    blamed = judge(first, [first])
    other = Failure(
        blamed.cause.__class__("stall", "rank 1 kept the others waiting", True, 1, "node-1", 17), restart=True
    )
    assert follow([FailurePolicy.parse({**FAIL, "then": "avoid_host"})], first, other) is other
