"""The supervisor: one process that owns an attempt from its start to its result.

``python -m mxdist.runtime.supervisor <attempt dir> --incarnation N --secrets FILE [--foreground]``

It detaches itself unless it is to stay in the foreground, claims its place in the run store, and tells its starter by
the exit code of the process that was started. Then it starts a world of ranks, watches it, starts the next one while
that can help, and ends with a result. It sleeps until a rank ends, a signal comes, or a second is over.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mxdist import processes
from mxdist.environment import SUPERVISOR_SECRETS
from mxdist.errors import Fenced, HostLost, LaunchError, MxdistError
from mxdist.launch.plan import Plan, build_plan
from mxdist.private import dump_no_core
from mxdist.runtime import exit_codes
from mxdist.runtime.arrival import (
    Given,
    claim_place,
    next_incarnation,
    open_place,
    stop_yielding,
    take_secrets,
    yield_to_ranks,
)
from mxdist.runtime.blame import Failure, first_failure, judge
from mxdist.runtime.ending import STOPPING, Ended, Stop, host_lost, or_full_disk, stopped
from mxdist.runtime.finish import Finisher, Outcome, Tracker
from mxdist.runtime.hosts import Hosts
from mxdist.runtime.openers import gather, known_hosts
from mxdist.runtime.place import JOURNAL, Place, read_json, world_numbers, write_json
from mxdist.runtime.policies import follow
from mxdist.runtime.reaching import Reacher, plan_params
from mxdist.runtime.reporter import Reporter
from mxdist.runtime.slurm_job import slurm_job
from mxdist.runtime.status import Status
from mxdist.runtime.wake import Wake
from mxdist.runtime.watch import Watchdog
from mxdist.runtime.world import World
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, Cause
from mxdist.tracking.mirror import restore

log = logging.getLogger("mxdist.supervisor")

PERIOD_S = 1.0
_SETTLE_S = 5.0  # a rank that failed because of another is not blamed before that one had time to exit
_STACKS_S = 3.0
_AFTER_FAILURE_S = 3.0
_RESTART_PAUSE_S = 1.0
_HOST_PAUSE_S = 5.0


class Supervisor:
    """Runs one attempt.

    :param replan: makes a plan for some of the hosts.
    :param incarnation: which supervisor of the attempt this is.
    """

    def __init__(
        self,
        attempt: Attempt,
        place: Place,
        plan: Plan,
        hosts: Hosts,
        *,
        replan: Callable[[Sequence[str]], Plan],
        incarnation: int,
        wake: Wake,
    ) -> None:
        self._attempt, self._place, self._plan, self._hosts, self._wake = attempt, place, plan, hosts, wake
        self._job = attempt.claim.parsed()
        self._limits = self._job.limits
        self._host = os.uname().nodename
        self._slurm_job = slurm_job(self._job)
        self._reporter = Reporter(attempt, place.folder, incarnation=incarnation, wake=wake.call)
        self._tracker = Tracker(attempt, self._job, place.folder / JOURNAL, plan_params(plan))
        self._finisher = Finisher(attempt, self._job, place.folder, self._tracker, lambda: wake.terminated)
        seen = attempt.read_state()
        self._status = Status(self._reporter, self._tracker, seen)
        possible = [host.name for host in self._job.cluster.inventory]
        self._reacher = Reacher(hosts, possible, replan, self._status.note)
        self._world_number = max(seen.world, incarnation - 1, *world_numbers(place.folder), 0)

    def run(self) -> None:
        """Do everything, from the first world to the result."""
        self._reporter.start()
        if self._world_number:  # on another host than the last supervisor's, or after this one's power loss
            self._finisher.patiently(lambda: restore(self._attempt, self._place.folder / JOURNAL))
        self._tracker.start()
        if self._world_number == 0 and self._attempt.claim.note:
            self._status.note(self._attempt.claim.note)
        outcome = Outcome.load(self._place.folder)
        if outcome is None:
            outcome = self._work()
            if outcome is not None:
                self._save(outcome)
        self._hosts.close(clean=outcome is not None)
        if outcome is not None:
            self._publish(outcome)
        self._reporter.close()

    def _work(self) -> Outcome | None:
        """Run worlds until one of them settles it; None: somebody else owns the attempt now."""
        if self._world_number > self._limits.max_restarts:
            return self._outcome(self._lost())
        while True:
            try:
                ended = self._one_world()
            except HostLost as error:
                ended = Ended(stop=self._stop_wanted(), failure=host_lost(error))
            except (LaunchError, OSError) as error:
                cause = Cause("internal", str(error), getattr(error, "retryable", True), host=self._host)
                ended = Ended(stop=self._stop_wanted(), failure=Failure(cause, restart=False))
            failure = ended.failure
            if self._comes_back(ended):
                return None
            if ended.stop is not None or failure is None:
                return self._outcome(ended)
            if not failure.restart or self._world_number > self._limits.max_restarts:
                return self._outcome(self._unless_stopped(ended) if failure.by_policy else ended)
            left = self._limits.max_restarts - self._world_number
            self._status.note(f"{failure.cause.message}; starting again from the last checkpoint ({left} more left)")
            if failure.avoid and failure.cause.host:
                self._plan = self._reacher.avoid(self._plan, failure.cause.host)
            self._wake.wait(_RESTART_PAUSE_S)
            stop = self._stop_wanted()
            if stop is not None:
                return self._outcome(Ended(stop=stop))

    def _unless_stopped(self, ended: Ended) -> Ended:
        """Believe a job's policy only if nobody wants the job's end: a signal may have reached a rank first."""
        self._wake.wait(_RESTART_PAUSE_S)
        stop = self._stop_wanted()
        return ended if stop is None else Ended(stop=stop)

    def _comes_back(self, ended: Ended) -> bool:
        """Whether the platform starts this job again, with other hosts if need be: then nothing is settled yet."""
        if self._slurm_job is None or self._reporter.cancel is not None:
            return False
        failure = ended.failure if ended.stop is None else None
        lost_host = failure is not None and failure.restart and failure.cause.kind == "host"
        if ended.stop is Stop.PREEMPT:
            back = self._slurm_job.comes_back()
        else:
            back = lost_host and self._world_number <= self._limits.max_restarts and self._slurm_job.give_back()
        if back:
            why = ended.failure.cause.message if ended.failure else STOPPING[Stop.PREEMPT]
            self._status.note(f"{why}; Slurm will start the job again, from the last checkpoint")
        return back

    def _lost(self) -> Ended:
        """The last supervisor died in the last world that was allowed: nothing may be trained any more."""
        message = f"the supervisor died; no restart is left of {self._limits.max_restarts}"
        failure = Failure(Cause("lost", message, True, host=self._host), restart=False)
        stop = self._stop_wanted()
        return Ended(stop=stop) if stop is not None else Ended(failure=failure)

    def _one_world(self) -> Ended:
        self._world_number += 1
        self._plan = self._reacher.reach(self._plan, patience_s=self._limits.start_timeout_s, pause=self._wait_for_host)
        world = World.prepare(self._place, self._plan, self._job, self._world_number, self._hosts)
        self._reporter.world_started(world.number, len(self._plan.ranks))
        self._status.show(world, JobState.STARTING)
        try:
            world.start()
            yield_to_ranks()
            ended = self._watch(world)
            self._collect(world, ended)
        finally:
            stop_yielding()
            world.end(grace_s=min(self._limits.grace_s, _AFTER_FAILURE_S))
            self._reporter.world_ended()
        self._status.show(world, JobState.STOPPING)
        return ended

    def _wait_for_host(self, why: str) -> bool:
        """Wait before a host is tried again; return whether it is to be."""
        self._status.note(f"{why}; trying again")
        again_at = time.monotonic() + _HOST_PAUSE_S
        while self._stop_wanted() is None and time.monotonic() < again_at:
            self._wake.wait(min(PERIOD_S, max(0.01, again_at - time.monotonic())))
        return self._stop_wanted() is None

    def _collect(self, world: World, ended: Ended) -> None:
        """Bring the exported model here, from wherever rank 0 has made it."""
        reported = world.ranks[0].result().get("model_dir")
        if reported and ended == Ended():
            world.collect(Path(reported).name)

    def _watch(self, world: World) -> Ended:
        watchdog = Watchdog(world, self._limits)
        while True:
            self._wake.wait(PERIOD_S)
            world.reap()
            stop = self._stop_wanted()
            if stop is not None:
                return self._stop(world, stop)
            lost = world.lost()
            if lost is not None:
                return Ended(failure=host_lost(HostLost(lost.name, lost.lost)))
            if not world.running() or any(member.exit_code for member in (*world.ranks, *world.helpers)):
                ended = self._settle(world)
                if ended is not None:
                    return ended
            failure = watchdog.check()
            if failure is not None:
                self._status.note(f"{failure.cause.message}; the stacks of all ranks are in their logs")
                world.dump_stacks()
                self._await(world, _STACKS_S)
                return Ended(failure=failure)
            self._status.show(world, JobState.RUNNING if self._under_way(watchdog) else JobState.STARTING)

    def _under_way(self, watchdog: Watchdog) -> bool:
        is_script = isinstance(self._job, TrainingJob) and self._job.script is not None
        return is_script or watchdog.joined or any(seen.beat for seen in watchdog.seen.values())

    def _settle(self, world: World) -> Ended | None:
        """Judge the processes that have ended; None while the reason may still be to come."""
        exits = world.exits()
        first = first_failure(exits)
        if first is None:
            return Ended() if not world.running() else None
        settle_s = _SETTLE_S if len(self._plan.hosts) == 1 else self._limits.link_timeout_s + _SETTLE_S
        waiting = first.consequence and not first.gave_up and time.monotonic() - first.at < settle_s
        if waiting and world.running():
            return None
        return Ended(failure=follow(self._job.failures, first, judge(first, exits)))

    def _stop(self, world: World, stop: Stop) -> Ended:
        """Ask the ranks to end, and wait as long as they were promised."""
        self._status.note(f"{self._reporter.replaced or STOPPING[stop]}; the ranks are being stopped")
        self._status.show(world, JobState.STOPPING)
        if stop is not Stop.REPLACED and self._ask_to_stop(world, stop):
            self._await(world, self._limits.grace_s)
            self._status.show(world, JobState.STOPPING)
        trained = all(rank.exit_code == exit_codes.DONE for rank in world.ranks) and world.cooperative()
        return Ended() if trained and stop is Stop.PREEMPT else Ended(stop=stop)

    def _ask_to_stop(self, world: World, stop: Stop) -> bool:
        try:
            world.ask_to_stop(stop.value)
        except (OSError, LaunchError) as error:  # a full disk, here or there: no checkpoint can be written either
            self._status.note(f"the ranks cannot be asked to end, so they are killed: {error}")
            return False
        return True

    def _await(self, world: World, timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        while world.running() and time.monotonic() < give_up:
            self._wake.wait(min(PERIOD_S, max(0.01, give_up - time.monotonic())))
            world.reap()

    def _stop_wanted(self) -> Stop | None:
        deadline = self._attempt.claim.deadline_at
        if self._reporter.replaced:
            return Stop.REPLACED
        if self._reporter.cancel is not None:
            return Stop.DEADLINE if self._reporter.cancel.by == "deadline" else Stop.CANCEL
        if deadline is not None and time.time() >= deadline:
            return Stop.DEADLINE
        return Stop.PREEMPT if self._wake.terminated else None

    def _outcome(self, ended: Ended) -> Outcome | None:
        if ended.stop is Stop.REPLACED:
            return None
        reported = read_json(self._world_folder / "rank-0.result.json")
        base = Outcome(
            state=JobState.FAILED,
            metrics=reported.get("metrics") or self._status.state.metrics,
            steps=int(reported.get("steps") or self._status.state.step),
            samples_per_s=reported.get("samples_per_s") or self._status.state.samples_per_s,
            restarts=max(0, self._world_number - 1),
        )
        if ended.stop is not None:
            state, cause = stopped(ended.stop, self._reporter.cancel, self._limits, self._host)
            return replace(base, state=state, cause=cause)
        if ended.failure is not None:
            return replace(base, cause=or_full_disk(ended.failure.cause, self._place.folder))
        is_script = isinstance(self._job, TrainingJob) and self._job.script is not None
        if not is_script and reported.get("state") != "done":
            message = "every rank ended with code 0, but rank 0 left no result"
            return replace(base, cause=Cause("internal", message, True, 0, self._host, 0))
        outputs, model_dir = reported.get("outputs") or {}, reported.get("model_dir")
        model_dir = str(self._place.folder / Path(model_dir).name) if model_dir else None  # where it was collected
        return replace(base, state=JobState.SUCCEEDED, outputs=outputs, model_dir=model_dir)

    def _save(self, outcome: Outcome) -> None:
        """Note the outcome for the next supervisor, should this one be killed before it has published it."""
        try:
            outcome.save(self._place.folder)
        except OSError as error:
            self._status.note(f"the outcome cannot be noted in the scratch folder: {error}")

    def _publish(self, outcome: Outcome) -> None:
        ended = f": {outcome.cause.message}" if outcome.cause else ""
        self._status.note(f"{outcome.state.value}{ended}")
        self._reporter.drain(10.0)
        try:
            result = self._finisher.finish(outcome)
        except Fenced as error:
            log.info("nothing is published: %s", error)
            return
        log.info("the result is %s", result.state.value)
        self._status.end(result.state, outcome.cause.message if outcome.cause else "")
        self._reporter.drain(10.0)

    @property
    def _world_folder(self) -> Path:
        return self._place.folder / f"world-{self._world_number}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Detach, claim the place of one incarnation, and run the attempt."""
    parser = argparse.ArgumentParser(prog="mxdist.runtime.supervisor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--secrets", required=True)
    parser.add_argument("--again", help="nonces of claims by earlier runs of this batch job begin so")
    parser.add_argument("--foreground", action="store_true", help="do not detach: somebody waits for the end")
    options = parser.parse_args(arguments)
    secrets = take_secrets(options.folder / options.secrets)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    tell = None if options.foreground else _detach()
    processes.adopt_orphans()
    wake = Wake()
    os.environ.update({name: value for name, value in secrets.items() if name not in SUPERVISOR_SECRETS})
    place, attempt, told = open_place(options.folder, secrets)
    incarnation = next_incarnation(attempt, options.incarnation, options.again)
    ours = claim_place(attempt, incarnation, options.secrets)
    if tell is not None:
        with contextlib.suppress(BrokenPipeError):  # the starter lost patience; the place is ours all the same
            os.write(tell, b"1")
        os.close(tell)
    if ours:
        _supervise(place, attempt, Given(told, secrets), incarnation, wake)


def _detach() -> int:
    """Go on as a process of a session of its own; return the pipe by which the starter is told that all is well."""
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        sys.exit(0 if os.read(told, 1) else 1)
    os.close(told)
    os.setsid()
    return tell


def _supervise(place: Place, attempt: Attempt, given: Given, incarnation: int, wake: Wake) -> None:
    log.info("supervisor %d of attempt %d of %s", incarnation, attempt.number, attempt.claim.job_key)
    dump_no_core()
    processes.terminate(place.token, grace_s=0, exclude=(os.getpid(), os.getppid()))
    if attempt.result() is not None:
        return
    job = attempt.claim.parsed()
    names, here = known_hosts(job, given.told)

    def plan_on(hosts: Sequence[str] | None) -> Plan:
        return build_plan(
            job,
            attempt.claim.job_key,
            runs_uri=attempt.job.store.uri.removesuffix(f"/{attempt.claim.job_key}"),
            python=sys.executable,
            workdir=str(place.folder.parent.parent),
            cores=sorted(os.sched_getaffinity(0)),
            hosts=hosts,
        )

    plan = plan_on(names)
    hosts = gather(place, job, plan.hosts, given.told, given.secrets, here=here, wake=wake.call)
    with contextlib.suppress(OSError):  # for people only
        write_json(place.folder / "plan.json", plan.to_document())
    try:
        Supervisor(attempt, place, plan, hosts, replan=plan_on, incarnation=incarnation, wake=wake).run()
    except Exception:
        log.exception("the supervisor of %s failed", attempt.claim.job_key)
        processes.terminate(place.token, grace_s=0, exclude=(os.getpid(),))
        raise


if __name__ == "__main__":
    try:
        main()
    except MxdistError as error:
        log.error("%s", error)
        sys.exit(error.exit_code)
