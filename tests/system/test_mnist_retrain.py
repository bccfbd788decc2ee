"""The whole chain on real data, with real S3, MLflow and ranks."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from system.home import Airflow, Ended

TRAININGS = ("pretrain", "transfer", "finetune")


def ask(airflow: Airflow, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask MLflow itself, not our client."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{airflow.mlflow_url}/api/2.0/mlflow/{path}", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def runs_by_name(airflow: Airflow, ended: Ended) -> dict[str, dict[str, Any]]:
    experiment = ask(airflow, "experiments/get-by-name?experiment_name=mnist_retrain")["experiment"]
    found = ask(airflow, "runs/search", {"experiment_ids": [experiment["experiment_id"]], "max_results": 100})["runs"]
    of_run = [run for run in found if tags(run)["mxdist.airflow.run_id"] == ended.run_id]
    named = {run["info"]["run_name"]: run for run in of_run}
    assert len(named) == len(of_run), "two MLflow runs for one task"
    return named


def tags(run: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}


def champion(airflow: Airflow) -> str:
    return str(ask(airflow, "registered-models/alias?name=mnist_5_to_9&alias=champion")["model_version"]["version"])


def test_better_model_is_promoted_and_the_next_keeps_the_champion(airflow: Airflow) -> None:
    first = airflow.run("mnist_retrain")
    assert (first.state, set(first.tasks.values())) == ("success", {"success"}), first.output[-12000:]
    check_promoted(airflow, first)

    quick = {"pretrain_epochs": 1, "transfer_epochs": 1, "finetune_epochs": 1, "margin": 1}
    second = airflow.run("mnist_retrain", conf=quick)
    assert (second.state, set(second.tasks.values())) == ("success", {"success"}), second.output[-12000:]
    assert second.results["stage"]["uploaded_files"] == 0
    decision = second.results["promote"]
    assert (decision["decision"], decision["champion"]) == ("kept champion", "1")
    assert "does not beat" in decision["reason"]
    assert champion(airflow) == "1"


def check_promoted(airflow: Airflow, ended: Ended) -> None:
    results = ended.results
    assert results["stage"]["rows"] == 5000
    for task in TRAININGS:
        assert results[task]["state"] == "SUCCEEDED"
        assert len(json.dumps(results[task])) < 48_000
    assert results["finetune"]["labels"] == [5, 6, 7, 8, 9]
    assert results["evaluate"]["scores"]["challenger"]["accuracy"] >= 0.95
    assert (results["promote"]["decision"], champion(airflow)) == ("promoted", "1")

    runs = runs_by_name(airflow, ended)
    parent = runs.pop(f"mnist_retrain/{ended.run_id}")
    assert parent["info"]["status"] == "FINISHED"
    assert set(runs) == {*TRAININGS, "evaluate"}
    for name, run in runs.items():
        assert run["info"]["status"] == "FINISHED"
        assert tags(run)["mlflow.parentRunId"] == parent["info"]["run_id"]
        assert tags(run)["mxdist.airflow.task_id"] == name
        assert ended.xcoms[name]["mxdist_mlflow_run_url"].endswith(run["info"]["run_id"])
