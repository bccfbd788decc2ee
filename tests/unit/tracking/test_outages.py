"""Whatever MLflow, the network or the run store does, training goes on, and nothing is missing afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from unit.tracking.conftest import Begin, Claim, Job, finished, train, written

from mxdist.spec import JobState
from mxdist.store import Cause, Result
from mxdist.tracking.forwarder import Forwarder, replay
from stack.mlflow import Mlflow
from support.mlflow_proxy import MlflowProxy

pytestmark = pytest.mark.usefixtures("no_slow_calls")


@pytest.mark.parametrize("mood", ["hang", "500", "404"])
def test_an_outage_from_the_start_to_the_middle(
    begin: Begin, proxy: MlflowProxy, journal: Path, mlflow_has: Any, eventually: Any, mood: str
) -> None:
    proxy.always(mood)
    job, attempt, forwarder = begin()
    train(journal, range(1, 300))
    eventually(lambda: proxy.seen)
    eventually(lambda: sum(len(chunk["records"]) for _, chunk in attempt.journal.read()) == 598)
    proxy.always("pass")
    train(journal, range(300, 400))
    assert forwarder.drain(60)
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == written(journal)


def test_what_was_refused_once_may_be_put_right(
    begin: Begin, proxy: MlflowProxy, journal: Path, mlflow_has: Any, eventually: Any, caplog: Any
) -> None:
    proxy.always("404")
    job, _, forwarder = begin()
    train(journal, range(1, 50))
    eventually(lambda: "refused" in caplog.text)
    proxy.always("pass")
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == written(journal)


@pytest.mark.parametrize("mood", ["hang", "500"])
def test_an_outage_from_the_middle_until_after_the_end(
    begin: Begin, proxy: MlflowProxy, journal: Path, mlflow_has: Any, mood: str
) -> None:
    job, attempt, forwarder = begin()
    train(journal, range(1, 100))
    assert forwarder.drain(60)
    proxy.always(mood)
    train(journal, range(100, 200))
    began = time.monotonic()
    outcome = forwarder.close(JobState.FAILED, cause=Cause("rank_exit", "rank 1 exited with 3"), timeout_s=4)
    assert time.monotonic() - began < 30
    assert not outcome.complete
    assert outcome.run_id
    attempt.finish(
        Result(state=JobState.FAILED, ended_at=1_900_000_000.5, cause=Cause("rank_exit", "rank 1 exited with 3"))
    )
    assert not replay(attempt, job).complete
    proxy.always("pass")
    assert replay(attempt, job).complete
    run = mlflow_has.run(job)
    assert (run.info.status, run.info.end_time) == ("FAILED", 1_900_000_000_500)
    assert run.data.tags["mxdist.cause"] == "rank_exit: rank 1 exited with 3"
    assert mlflow_has.points(job) == written(journal)


def test_a_server_that_is_killed_and_comes_back(
    mlflow_server: Mlflow, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any
) -> None:
    job = make_job(mlflow_server.url)
    attempt = claim(job)
    mlflow_server.kill()  # down from the start
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
    train(journal, range(1, 50))
    mlflow_server.start()
    assert forwarder.drain(120)
    mlflow_server.kill()  # and away again until after the end
    train(journal, range(50, 90))
    assert not forwarder.close(JobState.SUCCEEDED, timeout_s=2).complete
    finished(attempt)
    assert "did not answer" in replay(attempt, job).message
    mlflow_server.start()
    assert replay(attempt, job).complete
    assert mlflow_has.run(job).info.status == "FINISHED"
    assert mlflow_has.points(job) == written(journal)
    assert replay(attempt, job).complete
    assert mlflow_has.points(job) == written(journal)


def test_a_batch_whose_answer_was_lost_counts_once(
    begin: Begin, proxy: MlflowProxy, journal: Path, mlflow_has: Any, eventually: Any
) -> None:
    job, _, forwarder = begin()
    eventually(lambda: forwarder.run_id)
    proxy.once("lose", "/runs/log-batch")
    train(journal, range(1, 100))
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == written(journal)


@pytest.mark.parametrize("ending", ["/runs/create", "/experiments/create"])
def test_a_create_whose_answer_was_lost_makes_one_run(
    begin: Begin, proxy: MlflowProxy, journal: Path, mlflow_has: Any, ending: str
) -> None:
    proxy.once("lose", ending)
    job, _, forwarder = begin()
    train(journal, range(1, 10))
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == written(journal)


def test_a_create_that_is_done_only_after_we_gave_up_on_it_leaves_no_second_run(
    begin: Begin, mlflow_has: Any, eventually: Any
) -> None:
    job, _, forwarder = begin()
    eventually(lambda: forwarder.run_id)
    run = mlflow_has.run(job)
    late = mlflow_has.client.call("create_run", run.info.experiment_id, tags=dict(run.data.tags))
    assert len(mlflow_has.runs(job)) == 2
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.run(job).info.run_id == forwarder.run_id != late.info.run_id


def test_the_run_store_away_for_a_while(begin: Begin, journal: Path, runs: Any, mlflow_has: Any) -> None:
    job, attempt, forwarder = begin()
    train(journal, range(50))
    assert forwarder.drain(60)
    folder = Path(runs.uri)
    folder.rename(folder.with_name("away"))
    folder.write_text("no folder here")  # every write and list fails
    train(journal, range(50, 100))
    assert not forwarder.drain(2)
    folder.unlink()
    folder.with_name("away").rename(folder)
    assert forwarder.drain(60)
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == written(journal)
