"""Which rank failed first, and what that means. Pure.

When one rank dies, the others fail a moment later because their peer is gone, and sometimes they are gone sooner: a
rank that raises first tells Horovod to shut down, and then takes its time to exit. So the order of the exits alone
would blame the wrong one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mxdist.runtime import exit_codes
from mxdist.runtime.logs import clean
from mxdist.store import Cause

_PEER_LOST = re.compile(
    rb"Horovod has been shut down|HorovodInternalError|Connection closed by peer|Connection reset by peer"
    rb"|gloo/transport|gloo::|Socket closed|Broken pipe"
)
_MISSING_RANKS = re.compile(rb"(\[\d+-\d+-\d+ \d+:\d+:\d+\.[^\n]*\n)?Missing ranks:\s*\n((?:\s*\d+!?: \[[^\n]*\n?)+)")
_MISTAKE = re.compile(
    r"(SyntaxError|IndentationError|TabError|NameError|UnboundLocalError|AttributeError|TypeError|NotImplementedError)\b"
)
"""Last words of Python that say the same on every try. ``ImportError`` does not: a share may have been away."""

_UNCAUGHT = 1
"""Python's exit code after an exception that nobody caught."""

_KINDS = {"data", "user_error", "nonfinite", "rank_exit", "internal"}
_SIGNAL_HINTS = {
    signal.SIGKILL: "the kernel does this when memory runs out",
    signal.SIGSEGV: "its log has the stack",
}


@dataclass(frozen=True)
class Exit:
    """How one rank ended, or another process of its world.

    :param rank: None for one that is no rank.
    :param code: its exit code; negative: killed by this signal.
    :param at: when it was seen, on any clock that only grows.
    :param log: the end of its log.
    :param error: what it reported itself: kind, message, retryable.
    :param role: the name of one that is no rank.
    :param host: where it ran.
    """

    rank: int | None
    code: int
    at: float
    log: bytes
    error: dict[str, Any] | None = None
    role: str = ""
    host: str = ""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.role or f"rank {self.rank}"

    @property
    def consequence(self) -> bool:
        """Whether it failed only because a peer was gone."""
        said = str((self.error or {}).get("message", "")).encode()
        return bool(_PEER_LOST.search(self.log) or _PEER_LOST.search(said))

    @property
    def gave_up(self) -> bool:
        """Whether it failed because Horovod's stall check had shut the world down."""
        return b"stalled for longer than" in self.log and b"Missing ranks" in self.log


@dataclass(frozen=True)
class Failure:
    """Why a world ended badly, and whether another one may be tried in the same attempt.

    :param avoid: whether that one is to do without the host where it happened.
    :param by_policy: whether the job itself said what follows.
    """

    cause: Cause
    restart: bool
    avoid: bool = False
    by_policy: bool = False


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """Return the failing exit that the others follow from; None while there is none."""
    failing = [one for one in exits if one.code != exit_codes.DONE]
    return min(failing, key=lambda one: (one.consequence, one.at, one.name), default=None)


def judge(first: Exit, exits: Sequence[Exit]) -> Failure:
    """Return what the first failing exit means."""
    early = [one.rank for one in exits if one.code == exit_codes.DONE and one.rank is not None]
    hosts = {one.rank: one.host for one in exits}
    missing = missing_ranks(first.log) if first.gave_up else []
    if missing:
        message = f"rank {missing[0]} kept the others waiting until Horovod gave up ({first.name} reported it)"
        message += "; it had ended with code 0" if missing[0] in early else ""
        return Failure(
            Cause("stall", message, True, missing[0], hosts.get(missing[0], first.host), first.code), restart=True
        )
    kind, message, retryable = _meaning(first)
    restart = first.code < 0 or first.code == exit_codes.RETRY
    restart = restart or (first.rank is None and first.code != exit_codes.USER_ERROR)  # servers run no user's code
    if first.consequence and early:  # nobody failed on its own, so whoever was content and left is the reason
        message = f"rank {early[0]} ended with code 0 while others still needed it ({message})"
        message += ": do all ranks have the same number of batches?"
        return Failure(Cause(kind, message, retryable, early[0], hosts[early[0]], exit_codes.DONE), restart)
    return Failure(Cause(kind, message, retryable, first.rank, first.host, first.code), restart)


def missing_ranks(log: bytes) -> list[int]:
    """Return the ranks that Horovod's stall check, which runs on rank 0, named last."""
    told = list(_MISSING_RANKS.finditer(log))
    if not told:
        return []
    named = [(int(rank), mark) for rank, mark in re.findall(rb"(\d+)(!?): \[", told[-1][2])]
    too_long = [rank for rank, mark in named if mark]  # marked by Horovod: beyond the limit
    return sorted(too_long or [rank for rank, _ in named])


def last_warning(log: bytes) -> bytes:
    """Return the last words of Horovod's stall check, with their time as its host's clock has it; empty: none."""
    told = list(_MISSING_RANKS.finditer(log))
    return told[-1][0] if told else b""


def _meaning(first: Exit) -> tuple[str, str, bool]:
    error = first.error or {}
    said = str(error.get("message") or _last_words(first.log))
    told = f": {said}" if said else ""
    if first.code < 0:
        return "rank_exit", f"{first.name} was killed by {_signal_name(-first.code)}", True
    if first.code == exit_codes.USER_ERROR:
        return _kind(error, "user_error"), f"{first.name} failed{told}", False
    if first.code == exit_codes.NONFINITE:
        return "nonfinite", f"{first.name} met a number that is not finite{told}", False
    if first.code == exit_codes.RETRY:
        return _kind(error, "rank_exit"), f"{first.name} failed{told}", True
    if first.code == _UNCAUGHT and first.rank is not None and _MISTAKE.match(said) and not first.consequence:
        return "user_error", f"{first.name} exited with code {first.code}{told}", False
    return "rank_exit", f"{first.name} exited with code {first.code}{told}", True


def _kind(error: dict[str, Any], default: str) -> str:
    kind = str(error.get("kind", default))
    return kind if kind in _KINDS else default


def _signal_name(number: int) -> str:
    try:
        found = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    hint = _SIGNAL_HINTS.get(found)
    return f"{found.name} ({hint})" if hint else found.name


def _last_words(log: bytes) -> str:
    lines = [clean(line).strip() for line in log.split(b"\n")]
    said = [line for line in lines if line]
    return said[-1][:500] if said else ""
