"""MLflow is down from before the start until after the end: the training does not mind, and all metrics arrive once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from faults.site import Run, Site, Trained, assert_trained_once

BEFORE_RESULT = "supervisor-before-result"


@pytest.fixture(scope="module")
def runs(site: Site, undisturbed: Trained) -> dict[str, Run]:
    """Two runs without MLflow: it is back before the operator takes over one, and after the end of the other."""
    mlflow = site.stack.mlflow
    mlflow.stop()
    try:
        waiting = site.train("mlflow-back-at-hand-over", hold=[BEFORE_RESULT])
        over = site.train("mlflow-back-after-the-end")
        waiting.reached(BEFORE_RESULT)
        over.ended()
    finally:
        mlflow.start()
    waiting.release()
    waiting.ended()  # else its operator and `mxdist reconcile` would get into each other's way
    return {"hand-over": waiting, "reconcile": over}


def test_metrics_arrive_when_the_operator_hands_over(runs: dict[str, Run], undisturbed: Trained) -> None:
    run = runs["hand-over"]
    assert_trained_once(run, undisturbed)
    assert not run.result().tracking_complete, "its supervisor could not know"
    (record,) = run.records()
    handed_over = run.site.stack.airflow.api.xcom("train", run.run_id, "train")
    assert handed_over["mlflow_run_id"] == record.run_id


def test_metrics_arrive_when_somebody_reconciles(runs: dict[str, Run], undisturbed: Trained) -> None:
    run = runs["reconcile"]
    assert run.task()["state"] == "success"
    assert run.records() == []
    for _ in range(2):  # a second time changes nothing
        done = _reconcile(run.site)
        assert done.returncode == 0, done.stdout + done.stderr
        assert_trained_once(run, undisturbed)


def _reconcile(site: Site) -> subprocess.CompletedProcess[str]:
    """Run `mxdist reconcile` as an administrator would."""
    command = [sys.executable, "-m", "mxdist.cli", "reconcile", "--runs", site.stack.runs_uri]
    command += ["--endpoint-url", site.stack.seaweed.endpoint_url]
    environment = {**os.environ, **site.stack.seaweed.credentials, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
