"""Look at the place where jobs will run, before they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from mxdist.errors import PreflightError
from mxdist.hooks.cluster import ClusterHook
from mxdist.hooks.mlflow import MlflowHook
from mxdist.operators.base import job_name
from mxdist.operators.failures import as_airflow
from mxdist.operators.train import dataset_fields
from mxdist.operators.values import yes
from mxdist.spec import Dataset
from mxdist.spec.job import BaseJob

if TYPE_CHECKING:
    from airflow.sdk import Context

_LONGEST = 4000


class PreflightOperator(BaseOperator):
    """Ask every host of a job at once whether it is ready, and fail with one table of all problems.

    It holds a worker for less than 20 s (``deep``: two minutes). Give it the ``cluster``, ``world_size`` and
    ``parallelism`` of the training that follows it. A failure may pass with a retry.

    Returns how many hosts were looked at.

    :param mxdist_conn_id: the connection that says where jobs run and files live.
    :param mlflow_conn_id: the connection to MLflow; None does not look at it.
    :param experiment: the MLflow experiment; default: the DAG's id.
    :param world_size: number of ranks.
    :param parallelism: more about the ranks: fields of ``Parallelism``.
    :param cluster: more about the nodes: fields of ``Cluster``.
    :param dataset: the dataset, as StageDatasetOperator returns it: is it readable on each host, does it fit its disk?
    :param deep: also import MXNet on every host, and compute something on every device.
    """

    template_fields: Sequence[str] = (
        "mxdist_conn_id",
        "mlflow_conn_id",
        "experiment",
        "world_size",
        "parallelism",
        "cluster",
        "dataset",
        "deep",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "parallelism": "json",
        "cluster": "json",
        "dataset": "json",
    }
    ui_color = "#e8f0fb"

    def __init__(
        self,
        *,
        mxdist_conn_id: str = ClusterHook.default_conn_name,
        mlflow_conn_id: str | None = MlflowHook.default_conn_name,
        experiment: str | None = None,
        world_size: int | str = 1,
        parallelism: Mapping[str, Any] | None = None,
        cluster: Mapping[str, Any] | None = None,
        dataset: Any = None,
        deep: bool | str = False,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("execution_timeout", timedelta(minutes=10))
        super().__init__(**kwargs)
        self.mxdist_conn_id = mxdist_conn_id
        self.mlflow_conn_id = mlflow_conn_id
        self.experiment = experiment
        self.world_size = world_size
        self.parallelism = parallelism
        self.cluster = cluster
        self.dataset = dataset
        self.deep = deep

    def execute(self, context: Context) -> dict[str, Any]:
        """Look at everything; then fail if there is any problem."""
        from mxdist.launch.check import check

        with as_airflow():
            hook = ClusterHook(self.mxdist_conn_id)
            mlflow = MlflowHook(self.mlflow_conn_id) if self.mlflow_conn_id else None
            found = check(
                self._job(context, hook, mlflow),
                hook.runs(),
                hook.platforms(),
                dataset=self._dataset(),
                secrets={**hook.secrets(), **(mlflow.secrets() if mlflow else {})},
                deep=yes("deep", self.deep),
            )
            told = found.describe()
            self.log.info("%s", told)
            if found.problems:
                raise PreflightError(told[:_LONGEST], retryable=True)
        return {"hosts": found.hosts}

    def _job(self, context: Context, hook: ClusterHook, mlflow: MlflowHook | None) -> BaseJob:
        tracking = {"experiment": self.experiment or context["ti"].dag_id, **({"uri": mlflow.uri} if mlflow else {})}
        return BaseJob.parse(
            {
                "name": job_name(self.task_id),
                "cluster": hook.cluster_fields(self.cluster or {}),
                "parallelism": {"world_size": self.world_size, **(self.parallelism or {})},
                "storage": {"endpoint_url": hook.settings.endpoint_url, "region": hook.settings.region},
                "tracking": tracking,
            }
        )

    def _dataset(self) -> Dataset | None:
        return None if self.dataset is None else Dataset.parse(dataset_fields(self.dataset, None))
