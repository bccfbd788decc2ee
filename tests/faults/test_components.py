"""Airflow itself comes back: each of its processes is killed once, and a run goes through afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from stack.processes import wait_until
from support.airflow_stack import Stack, StackFactory

DAG = """
from airflow.sdk import dag, task

@dag(schedule=None)
def hello():
    @task
    def greet():
        return {"said": "hello"}

    greet()

hello()
"""


@pytest.fixture(scope="module")
def stack(airflow_stack: StackFactory, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    dags: Path = tmp_path_factory.mktemp("dags")
    (dags / "hello.py").write_text(DAG)
    return airflow_stack(dags=dags)


@pytest.mark.parametrize("component", ["scheduler", "triggerer", "dag-processor", "api-server"])
def test_airflow_works_after_a_component_was_killed(stack: Stack, component: str) -> None:
    stack.airflow[component].kill()
    assert not stack.airflow[component].alive()
    stack.airflow[component].start()
    api = stack.airflow.api
    assert wait_until(lambda: any(dag["dag_id"] == "hello" for dag in api.get("dags")["dags"]), 300, poll_s=0.5)
    run_id = api.trigger("hello")
    assert wait_until(lambda: api.run("hello", run_id)["state"] in {"success", "failed"}, 300, poll_s=0.5)
    assert api.run("hello", run_id)["state"] == "success"
    assert api.xcom("hello", run_id, "greet") == {"said": "hello"}
