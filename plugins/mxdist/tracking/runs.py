"""One MLflow run per training, one parent run per chain: found or made by tag, whoever comes first.

MLflow has no "create if absent", so the run store decides: whoever writes the run's id there first has made it, and a
lease keeps the others from trying meanwhile.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mxdist.errors import NotFound, TrackingError
from mxdist.spec import EvaluationJob, JobState, TrainingJob, digest_of
from mxdist.store import Attempt, Cause, Claim, Lease, Register, Store
from mxdist.tracking.client import Client, Login, code_of, entities
from mxdist.tracking.links import run_url

TRAINING_TAG = "mxdist.training_id"
UID_TAG = "mxdist.training_uid"
PARENT_TAG = "mxdist.parent"

STATUS = {
    JobState.SUCCEEDED: "FINISHED",
    JobState.FAILED: "FAILED",
    JobState.DEADLINE: "FAILED",
    JobState.CANCELLED: "KILLED",
    JobState.PREEMPTED: "RUNNING",
}
"""What MLflow's page says at each end. A preempted training goes on later, in the same run."""

_LEASE_S = 60.0
_WAIT_S = 30.0
_TAG_LONGEST = 4900
_AIRFLOW = {"dag_id", "run_id", "task_id", "map_index", "try", "try_number", "url"}


@dataclass(frozen=True)
class RunRef:
    """Where a run is.

    :param deleted: somebody deleted it in MLflow; it is left alone.
    """

    experiment_id: str
    run_id: str
    url: str
    deleted: bool = False


def find_or_create_run(client: Client, attempt: Attempt, job: TrainingJob | EvaluationJob) -> RunRef:
    """Return the run of this training; two that ask at once get the same one.

    :raises TrackingError: MLflow cannot be reached, or refuses; asking again is safe.
    """
    origin = origin_claim(attempt)
    identity = {TRAINING_TAG: attempt.claim.training_id, UID_TAG: _uid(origin)}

    def make(experiment_id: str) -> str:
        tags = {**run_tags(attempt.claim, job), **identity}
        if job.tracking.parent:
            tags["mlflow.parentRunId"] = find_or_create_parent(client, attempt, job).run_id
        return _create(client, experiment_id, job.tracking.run_name or job.name, tags, origin.submitted_at)

    place = f"mlflow/{attempt.claim.origin}"
    return _make_once(client, attempt.job.store, place, job.tracking.experiment, identity, make)


def find_or_create_parent(client: Client, attempt: Attempt, job: TrainingJob | EvaluationJob) -> RunRef:
    """Return the parent run that the job's ``tracking.parent`` names, open."""
    key = str(job.tracking.parent)
    place = digest_of([client.uri, job.tracking.experiment, key])[:32]

    def make(experiment_id: str) -> str:
        tags = {PARENT_TAG: key, "mlflow.source.name": "mxdist", "mlflow.source.type": "JOB"}
        tags |= source_tags({key: value for key, value in attempt.claim.source.items() if key in {"dag_id", "run_id"}})
        return _create(client, experiment_id, key, tags, attempt.claim.submitted_at)

    parent = _make_once(client, attempt.job.runs, f"parents/{place}", job.tracking.experiment, {PARENT_TAG: key}, make)
    if not parent.deleted:
        client.call("update_run", parent.run_id, status="RUNNING")
    return parent


def find_parent(uri: str, key: str, *, login: Login | None = None) -> RunRef | None:
    """Return the parent run with this key, or None."""
    client = Client(uri, login)
    found = _parents(client, key)
    return _ref(client, found[0]) if found else None


def close_parent(uri: str, key: str, succeeded: bool, *, login: Login | None = None) -> int:
    """Close the parent runs with this key (one for each experiment its stages used); return how many there are.

    :raises TrackingError: MLflow cannot be reached, or refuses; asking again is safe.
    """
    client = Client(uri, login)
    runs = _parents(client, key)
    for run in runs:
        client.call("set_terminated", run.info.run_id, status="FINISHED" if succeeded else "FAILED")
    return len(runs)


def reopen(client: Client, run: RunRef, attempt: Attempt) -> None:
    """Say that this attempt works on the run now."""
    tags = {"mxdist.attempt": str(attempt.number), "mxdist.state": JobState.RUNNING.value}
    client.call("update_run", run.run_id, status="RUNNING")
    set_tags(client, run.run_id, {**tags, **source_tags(attempt.claim.source)})


def close_run(
    client: Client, run: RunRef, state: JobState, cause: Cause | None, *, ended_at: float, marked_success: bool = False
) -> None:
    """Give the run its true last state."""
    tags = {"mxdist.state": state.value}
    if cause is not None:
        tags["mxdist.cause"] = f"{cause.kind}: {cause.message}"
    if marked_success:
        tags["mxdist.marked_success"] = "true"
    set_tags(client, run.run_id, tags)
    if STATUS[state] == "RUNNING":  # it may have been closed otherwise before
        client.call("update_run", run.run_id, status="RUNNING")
    else:
        client.call("set_terminated", run.run_id, status=STATUS[state], end_time=int(ended_at * 1000))


def delete_twins(client: Client, run: RunRef, attempt: Attempt) -> None:
    """Delete runs of the same training that a create made whose answer never came."""
    identity = {TRAINING_TAG: attempt.claim.training_id, UID_TAG: _uid(origin_claim(attempt))}
    for twin in _search(client, [run.experiment_id], identity):
        if twin.info.run_id != run.run_id:
            client.call("delete_run", twin.info.run_id)


def set_tags(client: Client, run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags, in one request."""
    rows = [{"key": key, "value": value[:_TAG_LONGEST]} for key, value in tags.items()]
    client.call("log_batch", run_id, tags=entities("RunTag", rows))


def run_tags(claim: Claim, job: TrainingJob | EvaluationJob) -> dict[str, str]:
    """Return the tags that a run has from its first moment."""
    tags = {**job.tracking.tags, "mlflow.source.name": "mxdist", "mlflow.source.type": "JOB", "mxdist.kind": job.kind}
    tags |= {"mxdist.job_key": claim.job_key, "mxdist.attempt": str(claim.number)}
    tags["mxdist.code_digest"] = claim.code_digest
    if job.dataset is not None:
        tags |= {"mxdist.dataset_version": job.dataset.version, "mxdist.dataset_uri": job.dataset.manifest_uri}
    if isinstance(job, TrainingJob) and job.init is not None:
        tags["mxdist.parent_model"] = job.init.model_uri
    if job.tracking.parent:
        tags[PARENT_TAG + "_key"] = job.tracking.parent
    return {key: value[:_TAG_LONGEST] for key, value in {**tags, **source_tags(claim.source)}.items() if value}


def source_tags(source: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that say who asked."""
    named = {f"mxdist.airflow.{key}" if key in _AIRFLOW else f"mxdist.{key}": value for key, value in source.items()}
    return {key: str(value)[:_TAG_LONGEST] for key, value in named.items() if value}


def origin_claim(attempt: Attempt) -> Claim:
    """Return the claim of the attempt at which this training began."""
    if attempt.claim.origin == attempt.number:
        return attempt.claim
    try:
        return attempt.job.attempt(attempt.claim.origin).claim
    except NotFound:
        return attempt.claim


def _uid(origin: Claim) -> str:
    # The job key alone may come again: another run store on the same server, or one that was wiped.
    return hashlib.sha256(f"run of {origin.token}".encode()).hexdigest()[:24]


def _make_once(
    client: Client, store: Store, place: str, experiment: str, identity: Mapping[str, str], make: Callable[[str], str]
) -> RunRef:
    """Return the run that the register at ``place`` names; find or make it under a lease when there is none."""
    register, lease = Register(store, f"{place}/run"), Lease(store, f"{place}/lease", ttl_s=_LEASE_S)
    give_up = time.monotonic() + _WAIT_S
    while True:
        seen = register.read()
        if seen.value and (run := client.find("get_run", seen.value["run_id"])) is not None:
            return _ref(client, run)
        if lease.acquire():
            break
        if time.monotonic() > give_up:
            raise TrackingError(f"somebody else has been making the MLflow run of {store.uri} for {_WAIT_S:g} s")
        time.sleep(0.2)
    try:
        experiment_id = _experiment(client, experiment)
        found = _search(client, [experiment_id], identity)
        run_id = found[0].info.run_id if found else make(experiment_id)
        if register.swap(seen, {"run_id": run_id, "experiment_id": experiment_id}) is None:
            winner = register.read().value["run_id"]
            if winner != run_id and not found:
                client.call("delete_run", run_id)
            run_id = winner
        return _ref(client, client.call("get_run", run_id))
    finally:
        lease.release()


def _experiment(client: Client, name: str) -> str:
    for _ in range(2):
        known = client.find("get_experiment_by_name", name)
        if known is not None and known.lifecycle_stage == "deleted":
            hint = "Restore it in MLflow, or name another one in tracking.experiment."
            raise TrackingError(f"the experiment {name!r} was deleted at {client.uri}.", hint=hint, retryable=False)
        if known is not None:
            return str(known.experiment_id)
        try:
            return str(client.call("create_experiment", name))
        except TrackingError as error:
            if code_of(error) != "RESOURCE_ALREADY_EXISTS":
                raise
    raise TrackingError(f"the experiment {name!r} at {client.uri} comes and goes")


def _create(client: Client, experiment_id: str, name: str, tags: Mapping[str, str], started_at: float) -> str:
    started_ms = int(started_at * 1000)
    run = client.call("create_run", experiment_id, start_time=started_ms, tags=dict(tags), run_name=name[:250])
    return str(run.info.run_id)


def _search(client: Client, experiment_ids: list[str], identity: Mapping[str, str]) -> list[Any]:
    wanted = " and ".join(f"tags.`{key}` = {_quoted(value)}" for key, value in identity.items())
    order = ["attributes.start_time ASC"]
    return list(client.call("search_runs", experiment_ids, filter_string=wanted, order_by=order))


def _quoted(value: str) -> str:
    return f'"{value}"' if "'" in value else f"'{value}'"


def _parents(client: Client, key: str) -> list[Any]:
    experiments = [item.experiment_id for item in client.call("search_experiments", max_results=1000)]
    return _search(client, experiments, {PARENT_TAG: key}) if experiments else []


def _ref(client: Client, run: Any) -> RunRef:
    info = run.info
    page = run_url(client.uri, info.experiment_id, info.run_id)
    return RunRef(info.experiment_id, info.run_id, page, info.lifecycle_stage == "deleted")
