"""``mxdist plan``: what would run, with what it needs and costs, and what has changed since it last ran."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mxdist.cli import estimate, setting
from mxdist.errors import LaunchError, NotFound
from mxdist.launch import Launcher, Plan, collect
from mxdist.launch.base import Sent
from mxdist.launch.history import Change, Cost, LastRun, changes, cost, describe, last_run
from mxdist.launch.patience import bounded
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.cluster import ClusterKind
from mxdist.store import Store


def plan(options: argparse.Namespace) -> int:
    """Print what would run, after the checks that a submission makes; start nothing."""
    job = setting.job(options)
    client = setting.client(options, job)
    key = setting.job_key(options, job)
    found = client.launcher.plan(job, key, runs_uri=client.runs.uri)
    unchecked = _check(client.launcher, job)
    bundle = collect(job)
    last, unknown = _last(options, client.runs, job.name)
    seen = Seen(
        plan=found,
        sends=client.launcher.sends(job, key, runs_uri=client.runs.uri),
        memory=estimate.estimate(job, found) if options.estimate else None,
        cost=cost(job, last),
        last=last,
        changed=() if last is None else changes(last, job, bundle),
        notes=tuple(note for note in (unchecked, unknown) if note),
    )
    print(json.dumps(seen.to_document(), indent=2) if options.json else "\n".join(seen.lines()))
    return 0


def takes(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``, beside those that name a job."""
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--estimate", action="store_true", help="the memory it needs, too; fetches the dataset")
    parser.add_argument(
        "--diff",
        action=argparse.BooleanOptionalAction,
        help="what has changed since the last run of this name; default: if the run store knows one",
    )


@dataclass(frozen=True)
class Seen:
    """All that is shown of a job before it runs.

    :param sends: what the platform would be handed.
    :param last: the last run of this name, and what has changed since; None: none is known.
    :param notes: what could not be found out, and why.
    """

    plan: Plan
    sends: tuple[Sent, ...]
    memory: dict[str, Any] | None
    cost: Cost | None
    last: LastRun | None
    changed: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        document = self.plan.to_document() | {"sends": [asdict(one) for one in self.sends]}
        if self.memory:
            document["memory"] = self.memory
        if self.cost:
            document["cost"] = self.cost.to_document()
        if self.last:
            claim = self.last.attempt.claim
            changed = [asdict(change) for change in self.changed]
            document["since"] = {"job_key": claim.job_key, "attempt": claim.number, "changes": changed}
        return document

    def lines(self) -> Iterator[str]:
        """Yield everything as text."""
        yield self.plan.describe().rstrip()
        for one in self.sends:
            yield f"\n{one.title}"
            yield from (f"  {line}".rstrip() for line in one.text.rstrip().splitlines())
        if self.memory:
            yield f"\n{estimate.describe(self.memory)}"
        if self.cost:
            yield f"\ncost        {self.cost.describe()}"
        if self.last:
            yield ""
            yield from describe(self.last, self.changed)
        for note in self.notes:
            yield f"\nnote: {note}"


def _check(launcher: Launcher, job: TrainingJob | EvaluationJob) -> str:
    """Make the checks of a submission; return why a cluster could not be asked, for a plan does not need it."""
    try:
        launcher.check(job)
    except LaunchError as error:
        if job.cluster.kind is ClusterKind.LOCAL:
            raise
        return f"the cluster was not asked: {error}"
    return ""


def _last(options: argparse.Namespace, runs: Store, name: str) -> tuple[LastRun | None, str]:
    """Return the last run of this name, or why it is not known; a plan does not wait for a store that is away."""
    if options.diff is False:
        return None, ""
    nothing: LastRun | None = None
    found, why = bounded(lambda: (last_run(runs, name), ""), lambda why: (nothing, why))
    if found is None and options.diff:
        raise NotFound(why or f"no run of a job named {name!r} is known in {runs.uri}.")
    return found, f"what has changed since the last run is not known: {why}" if why else ""
