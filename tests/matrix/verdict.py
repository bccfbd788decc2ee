"""What must hold after every trial, read from Airflow, the run store, MLflow and the process table themselves."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from faults.site import Run, Trained, end_of
from matrix.cells import INTERVAL, STEPS, Trial, Victim

from mxdist.errors import NotFound
from mxdist.store import Attempt, Store

_REASONS = {Victim.S3: ("did not answer", "cannot read", "cannot write", "cannot list"), Victim.DATABASE: ("database",)}
"""By what a failure of the task must be explained, by victim; nobody else's loss may fail it."""


@dataclass
class Verdict:
    """What became of a trial.

    :param state: of the task.
    :param lost: steps that were trained again, at each restart.
    :param violations: what did not hold.
    """

    trial: Trial
    state: str = ""
    tries: int = 0
    attempts: int = 0
    restarts: int = 0
    lost: list[int] = field(default_factory=list)
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a violation unless something holds."""
        if not holds:
            self.violations.append(otherwise)

    def document(self) -> dict[str, Any]:
        """Return the verdict as JSON."""
        cell = self.trial.cell
        return {
            "seed": self.trial.seed,
            "victim": cell.victim.value,
            "moment": cell.moment.value,
            "fault": cell.fault.value,
            "barrier": self.trial.barrier,
            "outage_s": round(self.trial.outage_s, 1),
            "state": self.state,
            "tries": self.tries,
            "attempts": self.attempts,
            "restarts": self.restarts,
            "lost": self.lost,
            "seconds": round(self.seconds, 1),
            "violations": self.violations,
        }


def judge(trial: Trial, run: Run, undisturbed: Trained) -> Verdict:
    """Wait for the end of a trial's run and look at everything that it left."""
    began = time.monotonic()
    verdict = Verdict(trial)
    task = run.ended()
    verdict.state, verdict.tries = task["state"], task["try_number"]
    attempts = run.attempts()
    results = [end_of(attempt) for attempt in attempts]
    verdict.attempts = len(attempts)
    verdict.restarts = sum(result.restarts for result in results)
    succeeded = [result for result in results if result.state.value == "SUCCEEDED"]
    if task["state"] == "success":
        verdict.expect(len(succeeded) == 1, f"{len(succeeded)} attempts succeeded")
    else:
        verdict.expect(_explained(trial, run), "the task failed, and its log does not say why")
        verdict.expect(len(succeeded) <= 1, f"{len(succeeded)} attempts succeeded")
    for result in succeeded:
        verdict.expect(result.model_digest == undisturbed.model_digest, "other weights than the undisturbed run's")
        if not result.tracking_complete:
            run.site.reconcile()
    for attempt in attempts:
        run.gone()
        verdict.violations += [f"partial: {key}" for key in _partial(attempt)]
    _judge_steps(verdict, run)
    _judge_record(verdict, run, undisturbed, trained=bool(succeeded))
    verdict.seconds = time.monotonic() - began
    return verdict


def _judge_steps(verdict: Verdict, run: Run) -> None:
    """No world may go on from before the last checkpoint of the one before: told by the barriers that they passed.

    The last one that was written may not have been published when its rank was killed; the one before it was.
    """
    order = run.barrier("starting-rank-0", "reached")
    worlds = order.read_text().split() if order.exists() else []
    steps = {pid: _passed(run, pid, "step-{}-rank-0", range(1, STEPS + 1)) for pid in worlds}
    for before, after in pairwise([pid for pid in worlds if steps[pid]]):
        written = _passed(run, before, "checkpoint-{}-written", range(INTERVAL, STEPS + 1, INTERVAL))
        published = written[-2] if len(written) > 1 else min(steps[before]) - 1
        verdict.lost.append(max(steps[before]) - min(steps[after]) + 1)
        verdict.expect(min(steps[after]) > published, f"step {published} was saved, but {min(steps[after])} came next")


def _passed(run: Run, pid: str, barrier: str, steps: Iterable[int]) -> list[int]:
    """Return the steps at which a process passed a barrier."""
    paths = {step: run.barrier(barrier.format(step), "reached") for step in steps}
    return [step for step, path in paths.items() if path.exists() and pid in path.read_text().split()]


def _judge_record(verdict: Verdict, run: Run, undisturbed: Trained, *, trained: bool) -> None:
    """MLflow has one run of the training, in its true state, with every loss once."""
    records = run.records()
    statuses = [record.status for record in records]
    verdict.expect("RUNNING" not in statuses, f"MLflow says {statuses}")
    if trained:
        verdict.expect(statuses.count("FINISHED") == 1, f"MLflow says {statuses}")
        finished = [record for record in records if record.status == "FINISHED"]
        if len(finished) == 1:
            losses = run.site.records.history(finished[0].run_id, "loss")
            verdict.expect(losses == undisturbed.losses, f"MLflow's losses: {losses}")
    else:
        verdict.expect("FINISHED" not in statuses, f"MLflow says {statuses}, but nothing was trained")


def _explained(trial: Trial, run: Run) -> bool:
    words = _REASONS.get(trial.cell.victim, ())
    errors = "\n".join(error for number in range(1, run.task()["try_number"] + 1) for error in run.errors(number))
    return any(word in errors for word in words)


def _partial(attempt: Attempt) -> Iterator[str]:
    """Yield what can be seen of the attempt's files but is not whole: by the sizes and digests that vouch for them."""
    for entry in attempt.store.list(""):
        if entry.key.endswith(".json"):
            try:
                json.loads(attempt.store.read(entry.key))
            except ValueError:
                yield entry.key
    for entry in attempt.store.list("checkpoints/index/"):
        index = json.loads(attempt.store.read(entry.key))
        for name, told in index["files"].items():
            if not _whole(attempt.store, f"{index['folder']}/{name}", told):
                yield f"{index['folder']}/{name}"
    try:
        manifest = attempt.store.read_json("model/manifest.json")
    except NotFound:
        return
    for told in manifest["files"]:
        if not _whole(attempt.store, f"model/{told['path']}", told):
            yield f"model/{told['path']}"


def _whole(store: Store, key: str, told: dict[str, Any]) -> bool:
    try:
        return hashlib.sha256(store.read(key)).hexdigest() == told["sha256"]
    except NotFound:
        return False
