"""End jobs that nobody wants any more, and finish what others left undone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from mxdist.errors import LaunchError
from mxdist.hooks.cluster import ClusterHook
from mxdist.hooks.mlflow import MlflowHook
from mxdist.operators.failures import as_airflow

if TYPE_CHECKING:
    from airflow.sdk import Context

    from mxdist.reconcile import Step

_STEPS_KEPT = 50
_LONGEST = 300


class AskAirflow:
    """Airflow's own answers, through the Task SDK."""

    def run_state(self, dag_id: str, run_id: str) -> str | None:
        """Return the state of a DAG run; None when there is no such run."""
        from mxdist.triggers.asking import run_state

        return run_state(dag_id, run_id)

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
        """Return the state of a task instance, which may be None."""
        from mxdist.triggers.asking import task_state

        return task_state(dag_id, run_id, task_id, map_index)


class ReconcileJobsOperator(BaseOperator):
    """Put right what was missed, for all jobs of a run store; to be run every few minutes.

    It ends jobs whose DAG run was deleted or is over, or whose task has ended; carries out cancels whose supervisor
    died; tells MLflow what it missed; closes parent runs; moves aliases to their champions. A job is ended only on
    Airflow's definite word, and only if this Airflow asked for it.

    Returns ``done`` and ``problems``, a sentence each. The task fails when a job may go on that nobody wants; what
    MLflow still lacks is only said, and tried again next time.

    :param mxdist_conn_id: the connection to the run store.
    :param mlflow_conn_id: the connection to MLflow; None leaves parent runs and aliases alone.
    """

    template_fields: Sequence[str] = ("mxdist_conn_id", "mlflow_conn_id")
    ui_color = "#f0f0f0"

    def __init__(
        self,
        *,
        mxdist_conn_id: str = ClusterHook.default_conn_name,
        mlflow_conn_id: str | None = MlflowHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("execution_timeout", timedelta(minutes=30))
        super().__init__(**kwargs)
        self.mxdist_conn_id = mxdist_conn_id
        self.mlflow_conn_id = mlflow_conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        """Do what is to do; then fail if a job could not be judged or ended."""
        with as_airflow():
            steps = []
            for step in self._steps(context):
                steps.append(step)
                (self.log.info if step.good else self.log.warning)("%s", step.message)
            if urgent := [step.message for step in steps if step.urgent]:
                raise LaunchError(
                    f"{len(urgent)} jobs may go on although nobody wants them: {'; '.join(urgent)[:2000]}"
                )
        return {"done": _told(steps, good=True), "problems": _told(steps, good=False)}

    def _steps(self, context: Context) -> Iterator[Step]:
        from mxdist import reconcile

        client, airflow = ClusterHook(self.mxdist_conn_id).job_client(), AskAirflow()
        here = reconcile.airflow_of(context["ti"].log_url, os.environ.get(reconcile.AIRFLOW_ID))
        found = list(reconcile.latest_of_airflow(client, here))
        asked = [one for one in found if isinstance(one, tuple)]
        yield from (one for one in found if isinstance(one, reconcile.Step))
        yield from reconcile.end_unwanted(client, asked, airflow)
        if self.mlflow_conn_id is None:
            yield from reconcile.finish_all(client)
            return
        mlflow = MlflowHook(self.mlflow_conn_id)
        uri, login = mlflow.uri, mlflow.login()
        yield from reconcile.finish_all(client, {uri: login})
        yield from reconcile.close_parents(uri, login, asked, airflow)
        yield from reconcile.project_champions(client, uri, login)


def _told(steps: Sequence[Step], *, good: bool) -> list[str]:
    return [step.message[:_LONGEST] for step in steps if step.good is good][:_STEPS_KEPT]
