"""One run per training and one parent per chain, whoever asks, however many at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mxdist.errors import TrackingError
from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, JobRun, Store
from mxdist.tracking.client import Client, Login
from mxdist.tracking.links import model_url
from mxdist.tracking.runs import close_parent, close_run, find_or_create_parent, find_or_create_run, find_parent
from stack.mlflow import Mlflow
from support.mlflow_proxy import MlflowProxy

Job = Callable[..., TrainingJob]
Claim = Callable[..., Attempt]


def at_once(count: int, function: Callable[[int], Any]) -> list[Any]:
    """Call a function in as many threads, all released at one moment."""
    barrier = threading.Barrier(count)

    def call(number: int) -> Any:
        barrier.wait()
        return function(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


def test_many_who_ask_at_once_get_one_run(mlflow_server: Mlflow, make_job: Job, claim: Claim, mlflow_has: Any) -> None:
    job = make_job(mlflow_server.url, tracking={"parent": "retrain/manual__1"})
    attempt = claim(job)
    found = at_once(6, lambda _: find_or_create_run(Client(mlflow_server.url), attempt, job))
    assert len(set(found)) == 1
    run = mlflow_has.run(job)
    assert run.info.run_id == found[0].run_id
    assert run.info.start_time == int(attempt.claim.submitted_at * 1000)
    parent = find_parent(mlflow_server.url, "retrain/manual__1")
    assert parent is not None
    assert run.data.tags["mlflow.parentRunId"] == parent.run_id


def test_a_lease_that_ran_out_makes_no_second_run(
    mlflow_server: Mlflow,
    make_job: Job,
    meeting: Callable[[str, int], Store],
    mlflow_has: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three hold the lease, since each slept past its end, and find no run; only the run store can tell them apart."""
    monkeypatch.setattr("mxdist.tracking.runs._LEASE_S", 0.0)
    monkeypatch.setattr("mxdist.tracking.runs._search", lambda *_: [])
    job = make_job(mlflow_server.url)
    attempt = JobRun(meeting("/run/0000000001.json", 3), "digits-1").claim(job, after=0)
    found = at_once(3, lambda _: find_or_create_run(Client(mlflow_server.url), attempt, job))
    assert len(set(found)) == 1
    assert mlflow_has.run(job).info.run_id == found[0].run_id


def test_many_stages_at_once_get_one_parent(mlflow_server: Mlflow, make_job: Job, claim: Claim) -> None:
    job = make_job(mlflow_server.url, tracking={"parent": "it's a chain"})
    attempts = [claim(job, key=f"stage-{number}") for number in range(6)]
    found = at_once(6, lambda number: find_or_create_parent(Client(mlflow_server.url), attempts[number], job))
    assert len({parent.run_id for parent in found}) == 1
    assert close_parent(mlflow_server.url, "it's a chain", True) == 1


def test_a_retry_finds_the_run_and_a_fresh_start_gets_a_new_one(
    mlflow_server: Mlflow, make_job: Job, claim: Claim
) -> None:
    job, client = make_job(mlflow_server.url), Client(mlflow_server.url)
    first = find_or_create_run(client, claim(job), job)
    assert find_or_create_run(client, claim(job, after=1, origin=1), job) == first
    assert find_or_create_run(client, claim(job, after=2), job) != first


def test_another_run_store_with_the_same_job_key_gets_its_own(
    mlflow_server: Mlflow, make_job: Job, claim: Claim, runs: Store
) -> None:
    job, client = make_job(mlflow_server.url), Client(mlflow_server.url)
    here = find_or_create_run(client, claim(job), job)
    there = JobRun(runs.child("other"), "digits-1").claim(job, after=0)
    assert find_or_create_run(client, there, job) != here


def test_a_run_that_was_made_but_not_written_down_is_found_by_its_tag(
    mlflow_server: Mlflow, make_job: Job, claim: Claim, runs: Store, mlflow_has: Any
) -> None:
    job, client = make_job(mlflow_server.url), Client(mlflow_server.url)
    attempt = claim(job)
    made = find_or_create_run(client, attempt, job)
    runs.delete([entry.key for entry in runs.list("digits-1/mlflow/")])
    assert find_or_create_run(client, attempt, job) == made
    assert len(mlflow_has.runs(job)) == 1


def test_a_wiped_server_gets_a_new_run(mlflow_server: Mlflow, make_job: Job, claim: Claim, runs: Store) -> None:
    job, client = make_job(mlflow_server.url), Client(mlflow_server.url)
    attempt = claim(job)
    runs.write_json("digits-1/mlflow/1/run/0000000001.json", {"token": "t", "value": {"run_id": "0" * 32}})
    made = find_or_create_run(client, attempt, job)
    assert made.run_id != "0" * 32
    assert find_or_create_run(client, attempt, job) == made


def test_a_parent_is_closed_with_the_state_of_the_chain(
    mlflow_server: Mlflow, make_job: Job, claim: Claim, mlflow_has: Any
) -> None:
    key = f"chain {id(object())}"
    job, client = make_job(mlflow_server.url, tracking={"parent": key}), Client(mlflow_server.url)
    parent = find_or_create_parent(client, claim(job), job)

    def status() -> str:
        return str(mlflow_has.client.call("get_run", parent.run_id).info.status)

    assert status() == "RUNNING"
    assert close_parent(mlflow_server.url, key, False) == 1
    assert status() == "FAILED"
    assert find_or_create_parent(client, claim(job, after=1), job) == parent
    assert status() == "RUNNING"
    close_parent(mlflow_server.url, key, True)
    assert status() == "FINISHED"
    assert close_parent(mlflow_server.url, "never heard of", True) == 0
    assert find_parent(mlflow_server.url, "never heard of") is None


def test_closing_twice_says_the_last_word(mlflow_server: Mlflow, make_job: Job, claim: Claim, mlflow_has: Any) -> None:
    job, client = make_job(mlflow_server.url), Client(mlflow_server.url)
    run = find_or_create_run(client, claim(job), job)
    close_run(client, run, JobState.FAILED, None, ended_at=1000.0)
    close_run(client, run, JobState.SUCCEEDED, None, ended_at=2000.0)
    info = mlflow_has.run(job).info
    assert (info.status, info.end_time) == ("FINISHED", 2_000_000)


def test_a_deleted_experiment_is_named(mlflow_server: Mlflow, make_job: Job, claim: Claim) -> None:
    job, client = make_job(mlflow_server.url), Client(mlflow_server.url)
    client.call("delete_experiment", client.call("create_experiment", job.tracking.experiment))
    with pytest.raises(TrackingError, match="was deleted.*Restore it") as caught:
        find_or_create_run(client, claim(job), job)
    assert not caught.value.retryable


def test_a_foreign_host_name_is_refused_with_the_flag_to_set(mlflow_server: Mlflow) -> None:
    with pytest.raises(TrackingError, match="--allowed-hosts"):
        Client(mlflow_server.url.replace("127.0.0.1", "127.1")).call("search_experiments")


def test_a_wrong_password_is_named_and_not_shown(secured_mlflow: Mlflow) -> None:
    with pytest.raises(TrackingError, match="refused the login.*user name and the password") as caught:
        Client(secured_mlflow.url, Login("admin", "wrong-secret")).call("search_experiments")
    assert "wrong-secret" not in str(caught.value)
    assert not caught.value.retryable
    login = Login.from_secrets(secured_mlflow.credentials)
    assert Client(secured_mlflow.url, login).call("search_experiments")
    assert str(secured_mlflow.password) not in repr(login)


def test_a_server_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(TrackingError, match="http://127.0.0.1:9 did not answer") as caught:
        Client("http://127.0.0.1:9").call("search_experiments")
    assert caught.value.retryable


def test_calls_leave_the_environment_as_it_was(mlflow_server: Mlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "mine")
    before = {key: value for key, value in os.environ.items() if key != "MLFLOW_DISABLE_TELEMETRY"}
    Client(mlflow_server.url, Login("a", "b")).call("search_experiments")
    assert {key: value for key, value in os.environ.items() if key != "MLFLOW_DISABLE_TELEMETRY"} == before


def test_a_hung_server_costs_one_bounded_call(proxy: MlflowProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxdist.tracking.client.CALL_TIMEOUT_S", 1)
    proxy.always("hang")
    with pytest.raises(TrackingError, match="did not answer"):
        Client(proxy.url).call("search_experiments")
    assert len(proxy.seen) == 1


def test_the_address_of_a_model() -> None:
    assert model_url("http://m:5000/", "digits 5/9", "3") == "http://m:5000/#/models/digits%205%2F9/versions/3"
