"""What a launcher must do, whatever platform it starts jobs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mxdist.launch.bundle import Bundle
from mxdist.launch.plan import Plan
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.store import Attempt


class Life(StrEnum):
    """What a launcher knows of an attempt's newest supervisor."""

    NEVER = "never started"
    ALIVE = "alive"
    DEAD = "dead"


@dataclass(frozen=True)
class Sent:
    """Something that a launcher hands to its platform: a command, a script, a manifest. Never a secret.

    :param title: what it is, and to whom it goes: ``sbatch script``, ``command on node1``.
    :param text: it, as it is sent; what exists at run time only stands as ``<name>``.
    """

    title: str
    text: str


class Launcher(ABC):
    """Starts supervisors and knows whether they live. It holds no state: that is in the run store and the platform."""

    @abstractmethod
    def plan(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> Plan:
        """Return what ``start`` would run.

        :raises LaunchError: the platform's settings are incomplete.
        """

    def sends(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> tuple[Sent, ...]:
        """Return what ``start`` would hand to the platform beside what ``plan`` says already; it asks nobody.

        :raises LaunchError: the platform's settings are incomplete.
        """
        return ()

    def check(self, job: TrainingJob | EvaluationJob) -> None:
        """Refuse what only the node environment can tell, where there is one on this host; else the ranks refuse it.

        :raises SpecError: with every wrong field.
        :raises LaunchError: the node environment gave no answer.
        """
        return

    @abstractmethod
    def start(self, attempt: Attempt, bundle: Bundle, *, incarnation: int, secrets: Mapping[str, str]) -> bool:
        """Start supervisor number ``incarnation`` and return once it has claimed its place.

        Idempotent: of any number of calls with one incarnation, at any hosts, one starts it.

        :return: whether this call's supervisor is the one that counts.
        :raises LaunchError: no supervisor could be started.
        """

    @abstractmethod
    def life(self, attempt: Attempt) -> Life:
        """Return what is known of the newest supervisor of ``attempt``."""

    @abstractmethod
    def kill(self, attempt: Attempt, *, grace_s: float) -> None:
        """End every process of ``attempt``; return only when none is left.

        :raises LaunchError: a process could not be ended, or cannot be reached from here.
        """

    def forget(self, attempt: Attempt) -> None:
        """Remove what the platform itself keeps of an attempt that is over; nobody waits until that is done.

        :raises LaunchError: the platform cannot be asked.
        """
        return
