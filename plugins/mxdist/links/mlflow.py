"""Links from a task to its MLflow run and model, there while the training still runs."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context
    from airflow.sdk.types import TaskInstanceKey


class _MlflowLink(BaseOperatorLink):
    """A link whose address the operator pushed as an XCom before it deferred.

    Airflow's pages read that XCom. When a task ends, the worker asks ``get_link`` and pushes the answer again, so
    it must be the same address.
    """

    key: ClassVar[str]

    @property
    def xcom_key(self) -> str:
        """The XCom that holds the address."""
        return self.key

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the address, or nothing while it is not known."""
        if url := getattr(operator, self.key, None):
            return str(url)
        if not self._expected(operator):
            return ""  # asking for an XCom that is not there leaves an error in the task's log
        from airflow.sdk.execution_time.xcom import XCom

        return XCom.get_value(ti_key=ti_key, key=self.key) or ""

    @classmethod
    def push(cls, context: Context, url: str | None) -> None:
        """Make the address known to the task's page."""
        if url:
            setattr(context["task"], cls.key, url)
            context["ti"].xcom_push(key=cls.key, value=url)

    @abstractmethod
    def _expected(self, operator: BaseOperator) -> bool:
        """Return whether an earlier process may have pushed the address."""


class MlflowRunLink(_MlflowLink):
    """The MLflow run of a training."""

    name = "MLflow run"
    key = "mxdist_mlflow_run_url"

    def _expected(self, operator: BaseOperator) -> bool:
        return bool(getattr(operator, "mlflow_conn_id", None))


class MlflowModelLink(_MlflowLink):
    """The registered model, or the version of it that the task made."""

    name = "MLflow model"
    key = "mxdist_mlflow_model_url"

    def _expected(self, operator: BaseOperator) -> bool:
        return bool(getattr(operator, "mlflow_conn_id", None) and getattr(operator, "registered_model", None))
