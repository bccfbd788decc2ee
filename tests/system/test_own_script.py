"""The first job on one's own script."""

from __future__ import annotations

from system.home import Airflow


def test_unchanged_script_runs_on_two_ranks(airflow: Airflow) -> None:
    ended = airflow.run("own_script", conf={"epochs": 2})
    assert ended.state == "success", ended.output[-8000:]
    for rank in (0, 1):
        assert f"of rank {rank}'s points are right" in ended.output
    result = ended.results["train"]
    assert (result["state"], result["attempt"], result["model_uri"]) == ("SUCCEEDED", 1, None)
    assert result["mlflow_run_url"].startswith(airflow.mlflow_url)
