"""The connection type ``mxdist_mlflow``: the MLflow server that records runs and keeps models."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.hook import BaseHook
from pydantic import Field

from mxdist.errors import MxdistError, Problem, SpecError
from mxdist.hooks.extras import chosen_extras
from mxdist.spec.base import Spec

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from mxdist.tracking.client import Login


class MlflowExtras(Spec):
    """What is taken from the extras of an ``mxdist_mlflow`` connection."""

    ui_url: str | None = Field(None, description="Where people reach the server, if not where Airflow does.")


class MlflowHook(BaseHook):
    """Say where MLflow is and how to log in.

    :param mlflow_conn_id: the connection's id.
    """

    conn_name_attr = "mlflow_conn_id"
    default_conn_name = "mxdist_mlflow"
    conn_type = "mxdist_mlflow"
    hook_name = "MLflow (mxdist)"

    def __init__(self, mlflow_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mlflow_conn_id = mlflow_conn_id

    @cached_property
    def connection(self) -> Connection:
        """The Airflow connection."""
        return self.get_connection(self.mlflow_conn_id)

    @cached_property
    def uri(self) -> str:
        """The server's address, without a password.

        :raises SpecError: the connection has no host.
        """
        connection = self.connection
        host = (connection.host or "").rstrip("/")
        if not host:
            problem = Problem("host", "is required: the server's address")
            raise SpecError(f"Connection {self.mlflow_conn_id!r}", [problem])
        address = host if "://" in host else f"{connection.schema or 'http'}://{host}"
        port = connection.port
        return f"{address}:{port}" if port and not address.endswith(f":{port}") else address

    @cached_property
    def ui_url(self) -> str:
        """The address that a person's browser uses."""
        extras = MlflowExtras.parse(chosen_extras(self.connection, MlflowExtras))
        return (extras.ui_url or self.uri).rstrip("/")

    def secrets(self) -> dict[str, str]:
        """Return the log-in, by the names of MLflow's environment variables."""
        login, password = self.connection.login, self.connection.password
        if password and not login:
            return {"MLFLOW_TRACKING_TOKEN": password}
        if login and password:
            return {"MLFLOW_TRACKING_USERNAME": login, "MLFLOW_TRACKING_PASSWORD": password}
        return {}

    def login(self) -> Login:
        """Return the log-in for mxdist's own MLflow client."""
        from mxdist.tracking.client import Login

        secrets = self.secrets()
        return Login(
            secrets.get("MLFLOW_TRACKING_USERNAME"),
            secrets.get("MLFLOW_TRACKING_PASSWORD"),
            secrets.get("MLFLOW_TRACKING_TOKEN"),
        )

    def test_connection(self) -> tuple[bool, str]:
        """Say whether the server answers a real question; ``/health`` answers even those it refuses."""
        from mxdist.tracking.client import Client

        try:
            Client(self.uri, self.login()).call("search_experiments", max_results=1)
        except MxdistError as error:
            return False, str(error)
        return True, f"MLflow at {self.uri} answers."
