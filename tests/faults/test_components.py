"""Airflow itself comes back: each of its processes is killed once, and a run goes through afterwards."""

from __future__ import annotations

import pytest
from faults.site import Site, wait_for


@pytest.mark.parametrize("component", ["scheduler", "triggerer", "dag-processor", "api-server"])
def test_airflow_works_after_a_component_was_killed(site: Site, component: str) -> None:
    airflow = site.stack.airflow
    airflow[component].kill()
    assert not airflow[component].alive()
    airflow[component].start()
    wait_for(lambda: any(dag["dag_id"] == "hello" for dag in airflow.api.get("dags")["dags"]), "the DAG")
    run_id = airflow.api.trigger("hello")
    wait_for(lambda: airflow.api.run("hello", run_id)["state"] in {"success", "failed"}, "its end")
    assert airflow.api.run("hello", run_id)["state"] == "success"
    assert airflow.api.xcom("hello", run_id, "greet") == {"said": "hello"}
