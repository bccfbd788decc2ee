"""Where trials happen: a whole Airflow on PostgreSQL, relays before S3 and MLflow, and who starts again what died."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from faults.site import RANKS, Run, Site, Trained, wait_for
from matrix.cells import INTERVAL, SIGNALS, STEPS, Fault, Moment, Trial, Victim

from mxdist import processes
from stack.processes import Process, ServiceError, family, process
from stack.service import Service
from support.postgres import Postgres
from support.relay import Mood, Relay

_LOOK_S = 1.0
_MOODS = {
    Fault.REFUSED: Mood.REFUSED,
    Fault.BLACK_HOLE: Mood.BLACK_HOLE,
    Fault.ERRORS: Mood.ERRORS,
    Fault.SLOW: Mood.SLOW,
}
_COMPONENTS = {Victim.TRIGGERER: "triggerer", Victim.SCHEDULER: "scheduler", Victim.API_SERVER: "api-server"}


class Manager:
    """Starts again whatever service has died, as systemd or Kubernetes would, unless a trial keeps it down."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services
        self._down: set[str] = set()
        self._busy = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="manager", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch over the services; at the end, all of them run."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    @contextmanager
    def down(self, service: Service) -> Iterator[None]:
        """Leave this one alone for a while."""
        with self._busy:
            self._down.add(service.name)
        try:
            yield
        finally:
            self._down.discard(service.name)

    def whole(self) -> bool:
        """Return whether every service runs and does its work."""
        return all(service.alive() and service.ready() for service in self._services)

    def _keep(self) -> None:
        while not self._over.wait(_LOOK_S):
            for service in self._services:
                with self._busy:
                    if service.name not in self._down and not service.alive():
                        self._start(service)

    def _start(self, service: Service) -> None:
        try:
            service.start()
        except ServiceError:  # the server that it needs is down: at the next look
            return


@dataclass(frozen=True)
class Scene:
    """All that a trial needs.

    :param relays: before S3 and MLflow.
    :param undisturbed: what a training ends with to which nothing happens.
    """

    site: Site
    postgres: Postgres
    relays: dict[Victim, Relay]
    undisturbed: Trained
    manager: Manager = field(repr=False)

    def hit(self, trial: Trial) -> Run:
        """Start a training, hold it at the trial's moment, do what is to be done, let it go; return its run."""
        holds = _holds(trial)
        run = self.site.train(f"trial-{trial.seed}", hold=holds, stall_timeout_s=_stall_s(trial))
        pids = _reached(trial, run, holds)
        if trial.cell.moment not in {Moment.BEFORE_SUBMIT, Moment.SUBMITTING}:
            wait_for(lambda: _deferred_or_later(run), f"{run.run_id} to be deferred")
        with self._fault(trial, run, pids):
            run.release()
            time.sleep(trial.outage_s)
        self.ready()
        return run

    def ready(self) -> None:
        """Wait until all servers work, whatever was done to them."""
        wait_for(self.manager.whole, "all services to work")

    @contextmanager
    def _fault(self, trial: Trial, run: Run, pids: Sequence[int]) -> Iterator[None]:
        victim, fault = trial.cell.victim, trial.cell.fault
        if fault not in SIGNALS:
            self.relays[victim].feel(_MOODS[fault])
            try:
                yield
            finally:
                self.relays[victim].feel(Mood.PASS)
        elif (service := self._service(victim)) is not None:
            yield from self._disturbed(service, fault)
        else:
            yield from _signalled(_processes(victim, run, pids), fault)

    def _disturbed(self, service: Service, fault: Fault) -> Iterator[None]:
        with self.manager.down(service):
            leader = service.process()
            if leader is None:  # an earlier trial's harm, and not yet mended
                raise AssertionError(f"{service.name} does not run")
            if fault is Fault.SIGSTOP:
                yield from _signalled(family([leader]), fault)
                return
            act: Callable[[], None] = service.kill if fault is Fault.SIGKILL else service.stop
            act()
            yield

    def _service(self, victim: Victim) -> Service | None:
        stack = self.site.stack
        if victim in _COMPONENTS:
            return stack.airflow[_COMPONENTS[victim]]
        return {Victim.S3: stack.seaweed, Victim.MLFLOW: stack.mlflow, Victim.DATABASE: self.postgres}.get(victim)


def _signalled(victims: Sequence[Process], fault: Fault) -> Iterator[None]:
    """Send the signal; who was stopped goes on afterwards."""
    sent = {Fault.SIGKILL: signal.SIGKILL, Fault.SIGTERM: signal.SIGTERM, Fault.SIGSTOP: signal.SIGSTOP}[fault]
    for victim in victims:
        victim.send(sent)
    try:
        yield
    finally:
        if fault is Fault.SIGSTOP:
            for victim in victims:
                victim.send(signal.SIGCONT)


def _processes(victim: Victim, run: Run, pids: Sequence[int]) -> list[Process]:
    """Return the processes of the job, or of its task, that are hit."""
    if victim is Victim.WORKER:
        found = processes.read(pids[0])
        assert found is not None
        wanted = [found.parent, pids[0]]
    elif victim is Victim.SUPERVISOR:
        wanted = [run.supervisor()]
    else:
        rank = [Victim.RANK_0, Victim.RANK_1].index(victim)
        wanted = [pids[rank] if len(pids) == RANKS else run.reached(f"starting-rank-{rank}")]
    known = [process(pid) for pid in wanted]
    assert all(known), f"{victim} is gone: {wanted}"
    return [one for one in known if one is not None and one.pid != os.getpid()]


def _holds(trial: Trial) -> list[str]:
    if "*" in trial.barrier:
        return [trial.barrier.replace("*", str(rank)) for rank in range(RANKS)]
    if trial.cell.moment is not Moment.CHECKPOINTING:
        return [trial.barrier]
    # A snapshot that waits too long gives way to the next one, so whichever is written first from that step on.
    first = int(trial.barrier.split("-")[1])
    return [f"checkpoint-{step}-written" for step in range(first, STEPS + 1, INTERVAL)]


def _reached(trial: Trial, run: Run, holds: Sequence[str]) -> list[int]:
    """Wait until the job is held; return the ids of the held processes."""
    if trial.cell.moment is not Moment.CHECKPOINTING:
        return [run.reached(name) for name in holds]

    def held() -> list[str]:
        return [name for name in holds if run.barrier(name, "reached").exists()]

    return [run.reached(wait_for(held, f"{run.run_id} at one of {holds}")[0])]


def _stall_s(trial: Trial) -> float:
    """Short where nothing else would find a rank that hangs; else so long that no wait at a barrier counts."""
    return 3600.0 if trial.cell.fault is not Fault.SIGSTOP else 60.0


def _deferred_or_later(run: Run) -> bool:
    return run.task()["state"] not in {None, "scheduled", "queued", "running"} or _handing_over(run)


def _handing_over(run: Run) -> bool:
    return run.barrier("hand-over", "reached").exists()
