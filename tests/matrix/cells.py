"""What can happen to whom, and when: every cell of the matrix either makes sense, or has a reason why it does not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from itertools import product


class Victim(StrEnum):
    """Who is hit."""

    WORKER = "Airflow worker"
    TRIGGERER = "triggerer"
    SCHEDULER = "scheduler"
    API_SERVER = "API server"
    SUPERVISOR = "supervisor"
    LAUNCHER = "launcher command"
    RANK_0 = "rank 0"
    RANK_1 = "rank 1"
    HOST = "host"
    LINK = "link to a host"
    S3 = "S3"
    MLFLOW = "MLflow"
    DATABASE = "metadata database"


class Moment(StrEnum):
    """How far the job is."""

    BEFORE_SUBMIT = "before submit"
    SUBMITTING = "between submit and persist"
    STARTING = "starting"
    FIRST_STEP = "first step"
    CHECKPOINTING = "checkpointing"
    LAST_STEP = "last step"
    PUBLISHING = "publishing the result"
    AFTER_RESULT = "after the result"


class Fault(StrEnum):
    """What is done."""

    SIGKILL = "SIGKILL"
    SIGTERM = "SIGTERM"
    SIGSTOP = "SIGSTOP"
    REFUSED = "connection refused"
    BLACK_HOLE = "black hole"
    ERRORS = "500s"
    SLOW = "slow"


SIGNALS = {Fault.SIGKILL, Fault.SIGTERM, Fault.SIGSTOP}
STEPS, INTERVAL = 16, 4
"""Of the training: its steps, and those between two checkpoints."""

_RANKS = {Victim.RANK_0, Victim.RANK_1}
_RELAYED = {Victim.S3, Victim.MLFLOW}
_EARLY = {Moment.BEFORE_SUBMIT, Moment.SUBMITTING}
_OUTAGE_S = (1.0, 12.0)


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    victim: Victim
    moment: Moment
    fault: Fault

    def __str__(self) -> str:
        return f"{self.victim}, {self.moment}, {self.fault}"

    @property
    def senseless(self) -> str | None:
        """Why it is not tried, or None."""
        if self.victim is Victim.LAUNCHER:
            return "the local launcher runs no command: the worker starts the supervisor itself"
        if self.victim in {Victim.HOST, Victim.LINK}:
            return "there is one host, and nothing between its processes that could break"
        if self.fault not in SIGNALS and self.victim not in _RELAYED:
            return "no relay stands before it; signals to a server are a refused connection and a black hole, too"
        if self.victim is Victim.DATABASE and self.fault is Fault.SIGTERM:
            return "PostgreSQL then waits until its clients have gone"
        if self.victim is Victim.WORKER and self.moment not in _EARLY | {Moment.AFTER_RESULT}:
            return "no worker holds the task while it is deferred"
        if self.victim is Victim.SUPERVISOR and self.moment is Moment.BEFORE_SUBMIT:
            return "there is none yet"
        if self.victim in _RANKS and self.moment in _EARLY:
            return "there are none yet"
        if self.victim in _RANKS and self.moment in {Moment.PUBLISHING, Moment.AFTER_RESULT}:
            return "they have ended"
        return None


EVERY = [Cell(*cell) for cell in product(Victim, Moment, Fault)]
SENSIBLE = [cell for cell in EVERY if cell.senseless is None]


@dataclass(frozen=True)
class Trial:
    """One trial, made from its seed alone.

    :param barrier: the moment's place in the job's life.
    :param outage_s: after how many seconds a server is back, or a stopped process goes on.
    """

    seed: int
    cell: Cell
    barrier: str
    outage_s: float

    def __str__(self) -> str:
        return f"{self.seed}: {self.cell} for {self.outage_s:.1f} s at {self.barrier}"


def draw(seed: int) -> Trial:
    """Return the trial of a seed; as many seeds in a row as there are cells try every cell once."""
    order = list(SENSIBLE)
    random.Random(0).shuffle(order)
    cell = order[seed % len(order)]
    choice = random.Random(seed)
    outage_s = choice.uniform(*_OUTAGE_S)
    barriers = _barriers(cell)
    return Trial(seed, cell, barriers[choice.randrange(len(barriers))], outage_s)


def _barriers(cell: Cell) -> list[str]:
    """Return the places of a moment; ``*`` stands for each rank."""
    saved = [f"checkpoint-{step}-written" for step in range(INTERVAL, STEPS, INTERVAL)]
    after = ["hand-over"] if cell.victim is Victim.WORKER else ["supervisor-after-result", "hand-over"]
    # Between the two, nothing of the job runs that a signal could reach.
    submitting = ["submit-started"] if cell.victim is Victim.SUPERVISOR else ["submit-claimed", "submit-started"]
    return {
        Moment.BEFORE_SUBMIT: ["submit-before-claim"],
        Moment.SUBMITTING: submitting,
        Moment.STARTING: ["starting-rank-*"],
        Moment.FIRST_STEP: ["step-1-rank-*"],
        Moment.CHECKPOINTING: saved,
        Moment.LAST_STEP: [f"step-{STEPS}-rank-*"],
        Moment.PUBLISHING: ["supervisor-before-result"],
        Moment.AFTER_RESULT: ["supervisor-after-result"] if cell.victim is Victim.SUPERVISOR else after,
    }[cell.moment]
