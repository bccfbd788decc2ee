"""Whose turn it is to train a model: one DAG run at a time for each registered model, the oldest data first.

Airflow's ``max_active_runs`` counts the runs of one DAG and has been passed by more of them at once; two DAGs may train
the same model as well. Then both would compare themselves with the same champion, and the second would be refused: its
training was for nothing. The record of a turn saves that work. It is no lock that safety rests on: what guards the
promotion is compare-and-swap (``registry.py``).

A turn has no time to live. It belongs to a DAG run, and ends when that run is over: whoever wants it asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self
from urllib.parse import quote

from mxdist.store import Register, Store

_ROOT = "_turns"
_KEPT = 5


@dataclass(frozen=True)
class Party:
    """A task that has the turn for its DAG run, or waits for it.

    :param airflow: which Airflow it belongs to; another one cannot be asked.
    :param as_of: the end of the data interval that it trains on, ISO 8601.
    :param job_key: the job that it submits in its turn.
    :param at: when it took its place, in Unix seconds.
    """

    airflow: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    as_of: str
    job_key: str
    at: float = field(default_factory=time.time, compare=False)

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        """Return the party in a document of any version of mxdist."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})

    @property
    def run(self) -> tuple[str, str, str]:
        """The DAG run that the turn belongs to."""
        return self.airflow, self.dag_id, self.run_id

    @property
    def order(self) -> tuple[str, str, str]:
        """What decides who goes first among those that wait."""
        return self.as_of, self.dag_id, self.run_id

    def __str__(self) -> str:
        return f"{self.dag_id}/{self.run_id}"


@dataclass(frozen=True)
class Asked:
    """What is asked of others before they are waited for. Whoever cannot be asked is waited for.

    :param over: whether the DAG run that has the turn is over.
    :param gone: whether a task waits no more.
    """

    over: Callable[[Party], bool]
    gone: Callable[[Party], bool]


@dataclass(frozen=True)
class _Places:
    holder: Party | None = None
    waiting: tuple[Party, ...] = ()

    @classmethod
    def load(cls, value: Any) -> Self:
        if not value:
            return cls()
        holder = value["holder"]
        return cls(Party.load(holder) if holder else None, tuple(Party.load(one) for one in value["waiting"]))


class Turns:
    """The turn of one model.

    :param runs: the store of all jobs.
    :param model: its name in the registry.
    """

    def __init__(self, runs: Store, model: str) -> None:
        self._register = Register(runs, f"{_ROOT}/{quote(model, safe='')}")

    def holder(self) -> Party | None:
        """Return who has the turn, or had it last."""
        return _Places.load(self._register.read().value).holder

    def ahead(self, me: Party, asked: Asked) -> Party | None:
        """Return whom ``me`` must wait for, or None; nothing is changed."""
        return _judge(_Places.load(self._register.read().value), me, asked)[0]

    def take(self, me: Party, asked: Asked, *, wait: bool = True) -> Party | None:
        """Take the turn, or a place among those that wait; taking it again changes nothing.

        :param wait: whether to take such a place.
        :return: whom ``me`` must wait for; None if it has the turn now.
        """
        while True:
            seen = self._register.read()
            before = _Places.load(seen.value)
            blocker, after = _judge(before, me, asked)
            if after == before or (blocker is not None and not wait):
                return blocker
            if self._register.swap(seen, asdict(after)) is not None:
                self._register.prune(keep=_KEPT)
                return blocker


def _judge(places: _Places, me: Party, asked: Asked) -> tuple[Party | None, _Places]:
    """Return whom ``me`` must wait for, and who has and waits for the turn from now on."""
    holder = places.holder
    if holder is not None and holder.run != me.run and asked.over(holder):
        holder = None
    others = [one for one in places.waiting if one.run != me.run]
    blocker = holder if holder is not None and holder.run != me.run else None
    if holder is None:
        ahead = sorted((one for one in others if one.order < me.order), key=lambda one: one.order)
        gone = [one for one in ahead if asked.gone(one)]
        others = [one for one in others if one not in gone]
        blocker = next((one for one in ahead if one not in gone), None)
    if blocker is None:
        return None, _Places(me, tuple(others))
    waiting = sorted([*others, me], key=lambda one: one.order)
    return blocker, _Places(holder, tuple(waiting))
