"""Whatever MLflow does, training goes on, and each point arrives exactly once with its own time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mxdist.spec import JobState, TrainingJob
from mxdist.store import Attempt, Cause, Result
from mxdist.tracking.forwarder import Forwarder, replay
from mxdist.tracking.journal import JournalReader, JournalWriter
from stack.mlflow import Mlflow
from support.mlflow_proxy import MlflowProxy
from support.places import REPOSITORY, node_python

pytestmark = pytest.mark.usefixtures("no_slow_calls")
Job = Callable[..., TrainingJob]
Claim = Callable[..., Attempt]


@pytest.fixture
def no_slow_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound each call tighter than in real life, so that a hung server is noticed soon."""
    monkeypatch.setattr("mxdist.tracking.client.CALL_TIMEOUT_S", 3)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def written(journal: Path, key: str = "loss") -> list[tuple[int, float, int]]:
    """Return what MLflow must have: the journal's records, read by the json module alone."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return [(line["step"], line["value"], line["time_ms"]) for line in lines if line["key"] == key]


def finished(attempt: Attempt, state: JobState = JobState.SUCCEEDED, cause: Cause | None = None) -> Attempt:
    attempt.finish(Result(state=state, ended_at=time.time(), cause=cause))
    return attempt


def train(journal: Path, steps: range) -> None:
    writer = JournalWriter(journal)
    for step in steps:
        writer.append({"loss": 1 / (step + 1), "accuracy": step / 1000}, step=step)
    writer.close()


def test_everything_arrives_and_the_run_is_closed(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, eventually: Any
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal, {"cores": [0, 1]})
    forwarder.start()
    train(journal, range(1, 1500))
    assert forwarder.drain(60)
    eventually(lambda: mlflow_has.run(job).info.status == "RUNNING")
    assert (
        forwarder.run_url
        == f"{proxy.url}/#/experiments/{mlflow_has.run(job).info.experiment_id}/runs/{forwarder.run_id}"
    )
    outcome = forwarder.close(JobState.SUCCEEDED)
    assert outcome.complete, outcome.message
    run = mlflow_has.run(job)
    assert (run.info.run_id, run.info.status) == (outcome.run_id, "FINISHED")
    assert mlflow_has.points(job) == written(journal)
    assert mlflow_has.points(job, "accuracy") == written(journal, "accuracy")
    assert run.data.params["cores"] == "[0,1]"
    assert run.data.params["optimizer.learning_rate"] == "0.05"
    expected = {
        "mxdist.job_key": "digits-1",
        "mxdist.training_id": "digits-1#1",
        "mxdist.attempt": "1",
        "mxdist.dataset_version": "ab" * 32,
        "mxdist.code_digest": "c0de",
        "mxdist.airflow.dag_id": "retrain",
        "mxdist.airflow.run_id": "manual__1",
        "mxdist.airflow.task_id": "train",
        "mxdist.airflow.try": "1",
        "mxdist.state": "SUCCEEDED",
    }
    assert expected.items() <= run.data.tags.items()
    assert [chunk["first"] for _, chunk in attempt.journal.read()][0] == 1
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("digits", ("ab" * 32)[:32])


def test_without_a_server_the_journal_is_mirrored_all_the_same(make_job: Job, claim: Claim, journal: Path) -> None:
    job = make_job(None)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
    train(journal, range(10))
    assert forwarder.close(JobState.SUCCEEDED).complete
    mirrored = [record for _, chunk in attempt.journal.read() for record in chunk["records"]]
    assert mirrored == [record.dump() for record in JournalReader(journal).read()]
    assert replay(finished(attempt), job).complete


@pytest.mark.parametrize("mood", ["hang", "500", "404"])
def test_an_outage_from_the_start_to_the_middle(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, eventually: Any, mood: str
) -> None:
    proxy.always(mood)
    job = make_job(proxy.url)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
    began = time.perf_counter()
    train(journal, range(1, 300))
    assert time.perf_counter() - began < 2.0, "writing metrics must not wait for MLflow"
    eventually(lambda: proxy.seen)
    eventually(lambda: sum(len(chunk["records"]) for _, chunk in attempt.journal.read()) == 598)
    proxy.always("pass")
    train(journal, range(300, 400))
    assert forwarder.drain(60)
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == written(journal)


@pytest.mark.parametrize("mood", ["hang", "500"])
def test_an_outage_from_the_middle_until_after_the_end(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, mood: str
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
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
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, eventually: Any
) -> None:
    job = make_job(proxy.url)
    forwarder = Forwarder(claim(job), job, journal)
    forwarder.start()
    eventually(lambda: forwarder.run_id)
    proxy.once("lose", "/runs/log-batch")
    train(journal, range(1, 100))
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == written(journal)


@pytest.mark.parametrize("ending", ["/runs/create", "/experiments/create"])
def test_a_create_whose_answer_was_lost_makes_one_run(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, ending: str
) -> None:
    proxy.once("lose", ending)
    job = make_job(proxy.url)
    forwarder = Forwarder(claim(job), job, journal)
    forwarder.start()
    train(journal, range(1, 10))
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == written(journal)


def test_a_create_that_is_done_only_after_we_gave_up_on_it_leaves_no_second_run(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, eventually: Any
) -> None:
    job = make_job(proxy.url)
    forwarder = Forwarder(claim(job), job, journal)
    forwarder.start()
    eventually(lambda: forwarder.run_id)
    run = mlflow_has.run(job)
    late = mlflow_has.client.call("create_run", run.info.experiment_id, tags=dict(run.data.tags))
    assert len(mlflow_has.runs(job)) == 2
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.run(job).info.run_id == forwarder.run_id != late.info.run_id


def test_a_restarted_world_repeats_no_step(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any
) -> None:
    job = make_job(proxy.url)
    forwarder = Forwarder(claim(job), job, journal)
    forwarder.start()
    train(journal, range(1, 58))
    first = written(journal)
    assert forwarder.drain(60)
    train(journal, range(51, 81))  # goes on from the checkpoint at step 50
    assert forwarder.close(JobState.SUCCEEDED).complete
    assert mlflow_has.points(job) == first + [point for point in written(journal)[57:] if point[0] > 57]
    assert [step for step, _, _ in mlflow_has.points(job)] == list(range(1, 81))


def test_a_new_supervisor_goes_on_where_the_old_one_was_killed(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    first = Forwarder(attempt, job, journal)
    first.start()
    train(journal, range(1, 40))
    assert first.drain(60)
    train(journal, range(30, 60))
    proxy.seen.clear()
    second = Forwarder(attempt, job, journal)
    second.start()
    assert second.close(JobState.SUCCEEDED).complete
    assert [step for step, _, _ in mlflow_has.points(job)] == list(range(1, 60))
    numbers = [r["n"] for _, chunk in attempt.journal.read() for r in chunk["records"]]
    assert numbers == list(range(1, 2 * (39 + 30) + 1))


def test_the_next_attempt_sends_what_the_first_could_not(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, tmp_path: Path, mlflow_has: Any
) -> None:
    proxy.always("500")
    job = make_job(proxy.url)
    first = claim(job)
    forwarder = Forwarder(first, job, journal)
    forwarder.start()
    train(journal, range(1, 58))
    assert not forwarder.close(JobState.PREEMPTED, timeout_s=2).complete
    finished(first, JobState.PREEMPTED)
    proxy.always("pass")
    changed = make_job(proxy.url, parallelism={"world_size": 2}, optimizer={"learning_rate": 0.25})
    second = claim(changed, after=1, origin=1)
    later = tmp_path / "second.jsonl"
    assert "attempt 2 goes on" in replay(first, job).message
    forwarder = Forwarder(second, changed, later)
    forwarder.start()
    train(later, range(51, 81))
    assert forwarder.close(JobState.SUCCEEDED).complete
    run = mlflow_has.run(job)
    assert mlflow_has.points(job) == written(journal) + [point for point in written(later) if point[0] > 57]
    assert run.data.params["optimizer.learning_rate"] == "0.05"
    assert run.data.params["parallelism.world_size"] == "1"
    retry = {key: value for key, value in run.data.tags.items() if key.startswith("mxdist.retry.")}
    assert retry == {"mxdist.retry.2.optimizer.learning_rate": "0.25", "mxdist.retry.2.parallelism.world_size": "2"}
    assert (run.info.status, run.data.tags["mxdist.attempt"]) == ("FINISHED", "2")
    assert replay(first, job).complete, "the second attempt has brought what the first could not"


def test_values_that_are_not_finite(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any
) -> None:
    job = make_job(proxy.url)
    forwarder = Forwarder(claim(job), job, journal)
    forwarder.start()
    writer = JournalWriter(journal)
    for step, value in enumerate([1.0, math.nan, 0.5, math.inf, -math.inf]):
        writer.append({"loss": value}, step=step)
    assert forwarder.close(JobState.FAILED, cause=Cause("nonfinite", "loss is nan")).complete
    assert [(step, value) for step, value, _ in mlflow_has.points(job)] == [(0, 1.0), (2, 0.5)]
    assert [(s, v) for s, v, _ in mlflow_has.points(job, "nonfinite_steps")] == [(1, 1.0), (3, 2.0), (4, 3.0)]
    assert mlflow_has.run(job).data.tags["mxdist.nonfinite"] == "loss was -inf at step 4"


def test_odd_names_and_long_values_stop_nothing(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any
) -> None:
    hosts = ",".join(f"node{number:04}" for number in range(800))
    job = make_job(
        proxy.url, model={"name": "lenet", "params": {"hosts": hosts}}, tracking={"tags": {"note": "n" * 9000}}
    )
    forwarder = Forwarder(claim(job), job, journal)
    forwarder.start()
    writer = JournalWriter(journal)
    writer.append({"top@5": 0.5, "a//b": 1.0, "é": 2.0, "loss": 3.0}, step=2**40)
    writer.append({"loss": 4.0}, step=2**63)  # no server can keep this one
    writer.append({"loss": 5.0}, step=2**41)
    outcome = forwarder.close(JobState.SUCCEEDED)
    assert outcome.complete, outcome.message
    run = mlflow_has.run(job)
    assert run.data.metrics.keys() == {"top_5", "a_b", "_", "loss"}
    assert [(step, value) for step, value, _ in mlflow_has.points(job)] == [(2**40, 3.0), (2**41, 5.0)]
    assert run.data.params["model.params.hosts"].startswith("sha256:")
    assert len(run.data.tags["note"]) == 4900
    artifacts = mlflow_has.client.call("list_artifacts", run.info.run_id)
    assert [artifact.path for artifact in artifacts] == ["config.json"]


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (JobState.SUCCEEDED, "FINISHED"),
        (JobState.FAILED, "FAILED"),
        (JobState.DEADLINE, "FAILED"),
        (JobState.CANCELLED, "KILLED"),
        (JobState.PREEMPTED, "RUNNING"),
    ],
)
def test_the_last_state_is_the_true_one(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, state: JobState, status: str
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    attempt.request_cancel("airflow", "marked success", marked_success=True)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
    assert forwarder.close(state).complete
    run = mlflow_has.run(job)
    assert (run.info.status, run.data.tags["mxdist.state"]) == (status, state.value)
    assert ("mxdist.marked_success" in run.data.tags) == (state is JobState.CANCELLED)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_supervisor_that_was_killed_leaves_its_run_to_the_replay(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, state: JobState
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
    train(journal, range(5))
    assert forwarder.drain(60)
    assert "has not ended" in replay(attempt, job).message
    assert replay(finished(attempt, state), job).complete
    assert mlflow_has.run(job).info.status == {"FAILED": "FAILED", "CANCELLED": "KILLED"}[state.value]


def test_a_fenced_attempt_stops_writing(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
    train(journal, range(5))
    assert forwarder.drain(60)
    claim(job, after=1, origin=1)
    train(journal, range(5, 10))
    outcome = forwarder.close(JobState.SUCCEEDED, timeout_s=60)
    assert not outcome.complete
    assert "newer attempt" in outcome.message
    assert [step for step, _, _ in mlflow_has.points(job)] == list(range(5))
    assert mlflow_has.run(job).info.status == "RUNNING"


def test_a_run_deleted_in_mlflow_is_left_alone(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, mlflow_has: Any, eventually: Any
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
    eventually(lambda: forwarder.run_id)
    mlflow_has.client.call("delete_run", forwarder.run_id)
    train(journal, range(5))
    outcome = forwarder.close(JobState.SUCCEEDED)
    assert outcome.complete
    assert "deleted" in outcome.message
    assert mlflow_has.runs(job) == []
    assert replay(finished(attempt), job).complete


def test_the_run_store_away_for_a_while(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path, runs: Any, mlflow_has: Any, eventually: Any
) -> None:
    job = make_job(proxy.url)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal)
    forwarder.start()
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


def test_the_step_time_does_not_depend_on_mlflow(
    proxy: MlflowProxy, make_job: Job, claim: Claim, journal: Path
) -> None:
    """10,000 records are written in the time of no request at all, though the server never answers."""
    proxy.always("hang")
    job = make_job(proxy.url)
    forwarder = Forwarder(claim(job), job, journal)
    forwarder.start()
    writer = JournalWriter(journal)
    slowest = 0.0
    for step in range(5000):
        began = time.thread_time()
        writer.append({"loss": 1.0, "accuracy": 0.5}, step=step)
        slowest = max(slowest, time.thread_time() - began)
    assert slowest < 0.5
    forwarder.close(JobState.SUCCEEDED, timeout_s=0.1)


NODE = """
import sys
from pathlib import Path
from mxdist.spec import JobState, parse_job
from mxdist.store import JobRun, open_store
from mxdist.tracking.forwarder import Forwarder
from mxdist.tracking.journal import JournalWriter
assert "mlflow" not in sys.modules
root, uri, experiment = sys.argv[1:]
job = parse_job({"name": "node", "script": {"path": "x.py"}, "tracking": {"uri": uri, "experiment": experiment}})
attempt = JobRun(open_store(root), "node-1").claim(job, after=0)
forwarder = Forwarder(attempt, job, Path(root, "journal.jsonl"))
forwarder.start()
writer = JournalWriter(Path(root, "journal.jsonl"))
for step in range(10):
    writer.append({"loss": 1.0 / (step + 1)}, step=step)
outcome = forwarder.close(JobState.SUCCEEDED, timeout_s=120)
assert outcome.complete, outcome
print(outcome.run_id)
"""


def test_the_node_environment_can_do_the_same(
    proxy: MlflowProxy, make_job: Job, tmp_path: Path, mlflow_has: Any
) -> None:
    job = make_job(proxy.url)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "plugins")}
    command = [str(node_python()), "-c", NODE, str(tmp_path), proxy.url, job.tracking.experiment]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert mlflow_has.run(job).info.run_id == done.stdout.strip()
    assert mlflow_has.points(job) == written(tmp_path / "journal.jsonl")


def test_mlflow_is_imported_when_it_is_needed_and_not_before() -> None:
    code = (
        "import sys, mxdist.tracking.forwarder, mxdist.tracking.registry, mxdist.tracking.gate, mxdist.tracking.models;"
        "print([name for name in ('mlflow', 'pandas', 'boto3', 'numpy') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "plugins")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
