"""Is every rank making progress?"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxdist.runtime import exit_codes
from mxdist.runtime.blame import Failure, last_warning, missing_ranks
from mxdist.runtime.place import read_json, tail
from mxdist.runtime.world import Rank, World
from mxdist.spec import EvaluationJob, Limits, TrainingJob
from mxdist.store import Cause


@dataclass
class Seen:
    """What the watchdog knows of one rank.

    :param changed_at: when it last showed that it makes progress (monotonic).
    :param stopped_at: since when its process is stopped by a signal, or None.
    """

    changed_at: float
    beat: dict[str, Any] = field(default_factory=dict)
    stopped_at: float | None = None

    @property
    def step(self) -> int:
        """The last step it told."""
        return int(self.beat.get("step", 0))

    @property
    def waits_for(self) -> int | None:
        """The rank that it cannot go on without, as it said with its last beat."""
        other = self.beat.get("waits_for")
        return None if other is None else int(other)


@dataclass
class Words:
    """What Horovod's stall check last said in a rank's log.

    Its own time stamps are of another host's clock, and of its zone: what counts is when new words were seen.
    """

    size: int = 0
    warning: bytes = b""
    seen_at: float = 0.0

    def look(self, log: Path, now: float) -> None:
        """Read the log's end if it has grown."""
        with contextlib.suppress(OSError):
            size = log.stat().st_size
            if size == self.size:
                return
            self.size, found = size, last_warning(tail(log))
            if found and found != self.warning:
                self.warning, self.seen_at = found, now

    def named(self, since: float) -> list[int]:
        """Return the ranks that it missed, if it said so after ``since``: before that, the stall was overcome."""
        return missing_ranks(self.warning) if self.seen_at >= since else []


class Watchdog:
    """Finds the rank that keeps a world from starting or going on.

    Clocks of other hosts do not matter: what counts is when a beat was seen to change.
    """

    def __init__(self, world: World, limits: Limits) -> None:
        now = time.monotonic()
        self._world = world
        self._limits = limits
        self._started_at = now
        self._first_joined_at: float | None = None
        self._all_joined_at: float | None = None
        self.seen = {rank.number: Seen(now) for rank in world.ranks}
        self._words = {rank.number: Words() for rank in world.ranks}
        self._helpers_stopped: dict[str, float] = {}

    @property
    def joined(self) -> bool:
        """Whether every rank has joined the world."""
        return self._all_joined_at is not None

    def check(self) -> Failure | None:
        """Look at every rank; return why the world must end, or None."""
        now = time.monotonic()
        for rank in self._world.running():
            self._look(rank, now)
        return self._stopped_helper(now) or self._not_started(now) or self._stalled(now)

    def _stopped_helper(self, now: float) -> Failure | None:
        """A server that is stopped holds up every rank, so it comes before them; servers do not beat."""
        for helper in self._world.helpers:
            name = helper.name
            if not helper.stopped:
                self._helpers_stopped.pop(name, None)
            elif now - self._helpers_stopped.setdefault(name, now) >= self._limits.stall_timeout_s:
                message = f"{name} has been stopped by a signal for {self._limits.stall_timeout_s:g} s"
                return Failure(Cause("stall", message, True, None, helper.host), restart=True)
        return None

    def _look(self, rank: Rank, now: float) -> None:
        seen = self.seen[rank.number]
        self._words[rank.number].look(rank.log, now)
        beat = read_json(rank.folder / f"rank-{rank.number}.beat.json")
        if beat and beat != seen.beat:
            seen.beat, seen.changed_at = beat, now
        if not rank.stopped:
            seen.stopped_at = None
        elif seen.stopped_at is None:
            seen.stopped_at = now

    def _not_started(self, now: float) -> Failure | None:
        """Ranks that are late. A script is not hurried before one of its ranks has called ``hvd.init()``."""
        if self._all_joined_at is not None:
            return None
        come = self._world.joined() | {number for number, seen in self.seen.items() if seen.beat}
        if come and self._first_joined_at is None:
            self._first_joined_at = now
        missing = [rank.number for rank in self._world.running() if rank.number not in come]
        if come and not missing:
            self._all_joined_at = now
            for seen in self.seen.values():
                seen.changed_at = max(seen.changed_at, now)
            return None
        since = self._first_joined_at if _is_patient(self._world.job) else self._started_at
        if since is None or now - since < self._limits.start_timeout_s or not missing:
            return None
        named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        message = f"{named} did not join the world within {self._limits.start_timeout_s:g} s"
        host = self._world.ranks[missing[0]].host
        return Failure(Cause("start_timeout", message, True, missing[0], host), restart=True)

    def _stalled(self, now: float) -> Failure | None:
        limit_s = self._limits.stall_timeout_s
        for rank in self._world.running():
            stopped_at = self.seen[rank.number].stopped_at
            if stopped_at is not None and now - stopped_at >= limit_s:
                return self._stall(rank, f"rank {rank.number} has been stopped by a signal for {limit_s:g} s")
        silent = [rank for rank in self._world.running() if self._silent(rank, now, limit_s)]
        if not silent:
            return None
        named = {number for rank in silent for number in self._words[rank.number].named(now - limit_s)}
        waiting = {rank.number: self.seen[rank.number].waits_for for rank in silent}
        named |= {other for other in waiting.values() if other is not None and waiting.get(other) is None}
        culprit = min(silent, key=lambda rank: self._suspicion(rank, named))
        seen = self.seen[culprit.number]
        what = "was stopped by a signal" if seen.stopped_at else "made no progress"
        message = f"rank {culprit.number} {what} for {limit_s:g} s, at step {seen.step}"
        left = [rank for rank in self._world.ranks if rank.exit_code == exit_codes.DONE]
        if not left:
            return self._stall(culprit, message)
        missed = [rank for rank in left if rank.number in named]  # Horovod says that the others wait for it
        message += f"; rank {(missed or left)[0].number} ended with code 0 before"
        return self._stall((missed or [culprit])[0], message)

    def _silent(self, rank: Rank, now: float, limit_s: float) -> bool:
        """Whether a rank that used to beat, or must, no longer does."""
        seen = self.seen[rank.number]
        beats = bool(seen.beat) or (self.joined and not _is_patient(self._world.job))
        return beats and now - seen.changed_at >= limit_s

    def _suspicion(self, rank: Rank, named: set[int]) -> tuple[bool, bool, int, float, int]:
        """The stopped one first, then whom others named, then the one that is behind, or was silent first.

        Beats are too coarse to tell who is behind by a step, so what Horovod and waiting ranks say comes first.
        """
        seen = self.seen[rank.number]
        return (seen.stopped_at is None, rank.number not in named, seen.step, seen.changed_at, rank.number)

    def _stall(self, rank: Rank, message: str) -> Failure:
        return Failure(Cause("stall", message, True, rank.number, rank.host), restart=True)


def _is_patient(job: TrainingJob | EvaluationJob) -> bool:
    """Whether ranks may work for long before they join, or never join: scripts and evaluations."""
    return isinstance(job, EvaluationJob) or job.script is not None
