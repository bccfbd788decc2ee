"""The smallest run that needs scheduler, DAG processor, API server and a worker."""

from __future__ import annotations

from airflow.sdk import dag, task


@dag(schedule=None)
def hello() -> None:
    @task
    def greet() -> dict[str, str]:
        return {"said": "hello"}

    greet()


hello()
