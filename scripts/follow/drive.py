"""Start the services, start the DAG run, follow it, and say how it ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from follow.conf import DAG
from follow.progress import ENDED, Follower, Snapshot
from follow.summary import rows, table
from follow.view import choose
from locking import locked
from mxdist.errors import MxdistError
from mxdist.store import Credentials, open_store
from mxdist.tracking.client import Login
from mxdist.tracking.links import model_url
from mxdist.tracking.runs import find_parent
from stack.airflow_api import AirflowApi, ApiError
from stack.local import LocalStack
from stack.processes import ServiceError, tail
from stack.service import start_all
from steps import StepFailed, Steps

RECONCILE_DAG = "mxdist_reconcile"
_PARSE_TIMEOUT_S = 180
_SILENCE_S = 60  # how long Airflow may not answer before that is the end
_POLL_S = 1.0


class DemoFailed(Exception):
    """The demo cannot go on; the text says why."""


def demo(repository: Path, home: Path, steps: Steps, conf: Mapping[str, Any]) -> int:
    """Run the demo with these parameters of the DAG and return its exit code."""
    stack: LocalStack | None = None
    try:
        with locked(home):
            stack = LocalStack(repository, home)
            started = start(stack, steps)
        return retrain(stack, steps, conf, after_a_start=started)
    except (DemoFailed, ServiceError, StepFailed, MxdistError, ApiError, OSError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Services and run go on; `make demo` starts another run, `make stop` ends everything.")
        if stack is not None:
            print(f"  {stack.airflow.url}")
        return 130


def start(stack: LocalStack, steps: Steps) -> bool:
    """Start what does not run yet; return whether there was anything to start."""
    print("Services", flush=True)
    if all(service.current() for service in stack.services):
        print("  still running", flush=True)
        return False
    with steps.step("S3 (SeaweedFS)"):
        stack.seaweed.start()
    stack.mlflow.spawn()  # gets ready while Airflow makes its database
    with steps.step("Airflow's database"):
        stack.airflow.prepare()
    with steps.step("MLflow and Airflow", lambda: _waiting(stack)):
        start_all([stack.mlflow, *stack.airflow.services])
    return True


def _waiting(stack: LocalStack) -> str:
    dead = [service.name for service in stack.dead()]
    return f"({', '.join(dead)} not running)" if dead else ""


def retrain(stack: LocalStack, steps: Steps, conf: Mapping[str, Any], *, after_a_start: bool = False) -> int:
    """Run the DAG once and return the exit code.

    :param after_a_start: services were away, so there may be something to put right.
    """
    api, begin = stack.airflow.api, time.monotonic()
    _await_dag(stack)
    if after_a_start:
        put_right(api)
    api.patch(f"dags/{DAG}", {"is_paused": False})
    run_id = api.trigger(DAG, conf)
    run_page = f"{stack.airflow.url}/dags/{DAG}/runs/{run_id}"
    print(f"DAG run {run_id}\n  {run_page}", flush=True)
    runs = open_store(
        stack.runs_uri,
        endpoint_url=stack.seaweed.endpoint_url,
        credentials=Credentials(stack.passwords.s3_access_key, stack.passwords.s3_secret_key),
    )
    follower = Follower(api, runs, DAG, run_id)
    last = _follow(stack, follower)
    steps.durations.append((f"DAG {DAG}", time.monotonic() - begin))
    return _report(stack, follower, last, steps, run_page)


def put_right(api: AirflowApi) -> None:
    """Start the DAG that ends and records what was missed while services were away; no schedule runs here."""
    if not api.get(f"dags/{DAG}/dagRuns", limit=1)["total_entries"]:
        return
    try:
        api.trigger(RECONCILE_DAG)
    except ApiError as error:
        print(f"  cannot start {RECONCILE_DAG}, which puts right what was missed: {error}", flush=True)


def _await_dag(stack: LocalStack) -> None:
    """Wait until the DAG processor has read the DAG file."""
    give_up = time.monotonic() + _PARSE_TIMEOUT_S
    while True:
        try:
            stack.airflow.api.get(f"dags/{DAG}")
            return
        except ApiError as error:
            if error.status != 404:
                raise
        errors = stack.airflow.api.get("importErrors")["import_errors"]
        if errors and time.monotonic() > give_up - _PARSE_TIMEOUT_S + 10:
            raise DemoFailed(f"Airflow cannot read a DAG file:\n{errors[0]['stack_trace']}")
        if time.monotonic() > give_up:
            log = stack.airflow["dag-processor"].log
            raise DemoFailed(f"Airflow has not read dags/{DAG}.py in time; the end of {log}:\n{tail(log)}")
        time.sleep(_POLL_S)


def _follow(stack: LocalStack, follower: Follower) -> Snapshot:
    view, heard = choose(), time.monotonic()
    try:
        while True:
            try:
                snapshot, heard = follower.look(), time.monotonic()
                view.show(snapshot)
                if snapshot.state in ENDED:
                    return snapshot
            except ApiError as error:
                if time.monotonic() - heard > _SILENCE_S:
                    raise DemoFailed(_lost(stack, error)) from error
            time.sleep(_POLL_S)
    finally:
        view.close()


def _lost(stack: LocalStack, error: ApiError) -> str:
    dead = stack.dead()
    if not dead:
        return str(error)
    names = ", ".join(service.name for service in dead)
    return f"these services ended while the run went on: {names}; {dead[0].last_words()}"


def _report(stack: LocalStack, follower: Follower, last: Snapshot, steps: Steps, run_page: str) -> int:
    results = {stage.task_id: _result(follower, stage.task_id) for stage in last.stages if stage.state == "success"}
    print(f"\n{table(rows(last.stages, results))}\n")
    complete = _links(stack, follower, results, run_page)
    print(f"\nWhere the time went\n{steps.table()}")
    print("\nThe services go on, for the next `make demo`; `make stop` ends them.")
    for stage in last.stages:
        if stage.state == "failed":
            print(f"\nStage {stage.task_id} failed: {follower.reason(stage)}", file=sys.stderr)
    if last.state != "success":
        print(f"The run ended as {last.state!r}.", file=sys.stderr)
        return 1
    if not complete:
        print("\nThe run succeeded, but not everything that it made was found: see the links.", file=sys.stderr)
        return 1
    return 0


def _result(follower: Follower, task_id: str) -> Any:
    try:
        return follower.result(task_id)
    except ApiError as error:
        print(f"\nWhat stage {task_id} handed over cannot be read: {error}", file=sys.stderr)
        return None


def _links(stack: LocalStack, follower: Follower, results: Mapping[str, Any], run_page: str) -> bool:
    """Show where everything is, or why not; return whether all of it is there."""
    parent, tracked = _parent(stack, follower)
    name = next((r["registered_model"] for r in results.values() if r and r.get("registered_model")), None)
    print(f"  DAG run           {run_page}")
    print(f"  MLflow run        {parent}")
    print(f"  Registered model  {model_url(stack.mlflow.url, name) if name else 'none: no stage names one'}")
    print(f"  Logins            {stack.passwords_file}")
    return tracked and name is not None


def _parent(stack: LocalStack, follower: Follower) -> tuple[str, bool]:
    """Return where the chain's run in MLflow is, or why nobody knows."""
    login = Login(stack.passwords.mlflow_user, stack.passwords.mlflow_password)
    try:
        found = find_parent(stack.mlflow.url, f"{follower.dag_id}/{follower.run_id}", login=login)
    except MxdistError as error:
        return f"not found: {error}", False
    return (found.url, True) if found else (f"none: MLflow at {stack.mlflow.url} has no run of this DAG run", False)
