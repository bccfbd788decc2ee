"""Each point arrives exactly once, with its own time, and nothing of a training stops for it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from unit.tracking.conftest import Begin, Claim, Job, finished, train, written

from mxdist.spec import JobState
from mxdist.store import Cause
from mxdist.tracking.client import Login
from mxdist.tracking.forwarder import Forwarder, replay
from mxdist.tracking.journal import JournalReader, JournalWriter
from stack.mlflow import Mlflow
from support.mlflow_proxy import MlflowProxy
from support.places import REPOSITORY, node_python

pytestmark = pytest.mark.usefixtures("no_slow_calls")


def test_a_refused_login_is_told_and_not_waited_for(
    secured_mlflow: Mlflow, make_job: Job, claim: Claim, journal: Path
) -> None:
    job = make_job(secured_mlflow.url)
    attempt = claim(job)
    forwarder = Forwarder(attempt, job, journal, login=Login("admin", "wrong-secret"))
    forwarder.start()
    train(journal, range(1, 10))
    began = time.monotonic()
    outcome = forwarder.close(JobState.SUCCEEDED, timeout_s=240)
    assert time.monotonic() - began < 240, "an outage would be waited for as long"
    assert not outcome.complete
    assert "refused the login" in outcome.message
    assert "wrong-secret" not in outcome.message
    assert attempt.journal.last(), "the run store has it all the same"


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


def test_a_restarted_world_repeats_no_step(begin: Begin, journal: Path, mlflow_has: Any) -> None:
    job, _, forwarder = begin()
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


def test_values_that_are_not_finite(begin: Begin, journal: Path, mlflow_has: Any) -> None:
    job, _, forwarder = begin()
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
        proxy.url, model={"recipe": "mine", "params": {"hosts": hosts}}, tracking={"tags": {"note": "n" * 9000}}
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
    begin: Begin, proxy: MlflowProxy, make_job: Job, tmp_path: Path, mlflow_has: Any
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
