"""The connection type ``mxdist``: where jobs run, and where their files live."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.hook import BaseHook
from pydantic import Field

from mxdist.errors import MxdistError, Problem, SpecError
from mxdist.hooks.extras import chosen_extras
from mxdist.spec.base import Spec
from mxdist.store import Credentials, Store, open_store

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from mxdist.launch.client import JobClient
    from mxdist.launch.platforms import Platforms
    from mxdist.store import Attempt


class ClusterSettings(Spec):
    """What an ``mxdist`` connection says; every field is an extra of the connection, and no other is taken."""

    runs_uri: str = Field(min_length=1, description="Run store: s3://bucket/runs or a folder that all hosts see.")
    data_uri: str | None = Field(None, description="Staged datasets: s3://bucket/data or a folder.")
    node_python: str | None = Field(None, description="Python of the node environment, with mxnet.")
    workdir: str | None = Field(None, description="Scratch folder for jobs on the nodes.")
    endpoint_url: str | None = Field(None, description="S3 server other than AWS.")
    region: str | None = Field(None, description="S3 region.")
    aws_conn_id: str | None = Field(None, description="Connection with the S3 keys; default: login and password here.")
    cluster_conn_id: str | None = Field(
        None, description="Connection to the hosts, of type mxdist_ssh, mxdist_slurm or kubernetes; default: this host."
    )


class AwsExtras(Spec):
    """What is taken from the extras of a connection of type ``aws``."""

    aws_session_token: str | None = None
    region_name: str | None = None
    endpoint_url: str | None = None


class ClusterHook(BaseHook):
    """Open the run store and start jobs, as one ``mxdist`` connection says.

    :param mxdist_conn_id: the connection's id.
    """

    conn_name_attr = "mxdist_conn_id"
    default_conn_name = "mxdist_default"
    conn_type = "mxdist"
    hook_name = "mxdist cluster"

    def __init__(self, mxdist_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mxdist_conn_id = mxdist_conn_id
        self._platform_connections: dict[str, Connection] = {}

    @cached_property
    def connection(self) -> Connection:
        """The Airflow connection."""
        return self.get_connection(self.mxdist_conn_id)

    @cached_property
    def settings(self) -> ClusterSettings:
        """The connection's extras, checked, with what the S3 connection adds.

        :raises SpecError: with every wrong extra.
        """
        settings = self._own_settings
        if not settings.aws_conn_id:
            return settings
        aws = self._aws_extras
        return settings.model_copy(
            update={
                "endpoint_url": settings.endpoint_url or aws.endpoint_url,
                "region": settings.region or aws.region_name,
            }
        )

    @cached_property
    def credentials(self) -> Credentials:
        """The S3 keys; empty when boto3 shall look for them itself (environment, instance role)."""
        if self._own_settings.aws_conn_id:
            return Credentials(
                self._aws_connection.login or None,
                self._aws_connection.password or None,
                self._aws_extras.aws_session_token,
            )
        return Credentials(self.connection.login or None, self.connection.password or None)

    def secrets(self) -> dict[str, str]:
        """Return what the nodes need to reach S3, by the names of environment variables."""
        keys = self.credentials
        named = {
            "AWS_ACCESS_KEY_ID": keys.access_key,
            "AWS_SECRET_ACCESS_KEY": keys.secret_key,
            "AWS_SESSION_TOKEN": keys.session_token,
        }
        return {name: value for name, value in named.items() if value}

    def open(self, uri: str) -> Store:
        """Return the store at ``uri``, reached with this connection's keys."""
        settings = self.settings
        return open_store(uri, endpoint_url=settings.endpoint_url, region=settings.region, credentials=self.credentials)

    def runs(self) -> Store:
        """Return the run store."""
        return self.open(self.settings.runs_uri)

    def data_uri(self) -> str:
        """Return where datasets are staged.

        :raises SpecError: the connection does not say.
        """
        if not self.settings.data_uri:
            problem = Problem("extra.data_uri", "is required to stage a dataset")
            raise SpecError(f"Connection {self.mxdist_conn_id!r}", [problem])
        return self.settings.data_uri

    def job_client(self, runs_uri: str | None = None) -> JobClient:
        """Return the client that submits, cancels and revives jobs.

        :param runs_uri: the run store to use instead of the connection's, for a job that lives there already.
        """
        from mxdist.launch.client import JobClient

        return JobClient(self.open(runs_uri or self.settings.runs_uri), self.platforms())

    def platforms(self) -> Platforms:
        """Return the launcher of all platforms, reached by the connections that the jobs name."""
        from mxdist.hooks.platforms import ConnectionAccess
        from mxdist.launch.platforms import Platforms

        return Platforms(access=ConnectionAccess(self.platform_connection))

    def cluster_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return where a job runs, as fields of ``Cluster``: what a task says, and what the connections say.

        :param given: the task's own; ``connection`` names another one than this connection does, ``kind: local`` none.
        """
        from mxdist.hooks.platforms import cluster_fields

        settings = self.settings
        fields = {"python": settings.node_python, "workdir": settings.workdir, **given}
        name = given.get("connection") or settings.cluster_conn_id
        if not name or given.get("kind") == "local":
            return fields
        return cluster_fields(self.platform_connection(str(name)), fields)

    def platform_connection(self, conn_id: str) -> Connection:
        """Return the connection to a platform."""
        if conn_id not in self._platform_connections:
            self._platform_connections[conn_id] = self.get_connection(conn_id)
        return self._platform_connections[conn_id]

    async def prefetch(self) -> None:
        """Fetch the connections without blocking an event loop; everything else then needs no Airflow."""
        self.connection = await self.aget_connection(self.mxdist_conn_id)
        if self._own_settings.aws_conn_id:
            self._aws_connection = await self.aget_connection(self._own_settings.aws_conn_id)

    async def prefetch_platform(self, attempt: Attempt) -> None:
        """Fetch the connection to the platform that a job runs on, likewise."""
        conn_id = (attempt.claim.job.get("cluster") or {}).get("connection")
        if conn_id:
            self._platform_connections[conn_id] = await self.aget_connection(conn_id)

    def test_connection(self) -> tuple[bool, str]:
        """Say whether the run store can be listed with these keys, and whether the platform can be used."""
        try:
            next(iter(self.runs().list("")), None)
        except MxdistError as error:
            return False, str(error)
        answers = f"The run store {self.settings.runs_uri} answers."
        if not self.settings.cluster_conn_id:
            return True, answers
        from mxdist.hooks.platforms import check_platform

        good, told = check_platform(self.platform_connection(self.settings.cluster_conn_id))
        return good, f"{answers} {told}"

    @cached_property
    def _own_settings(self) -> ClusterSettings:
        return ClusterSettings.parse(chosen_extras(self.connection, ClusterSettings))

    @cached_property
    def _aws_connection(self) -> Connection:
        return self.get_connection(str(self._own_settings.aws_conn_id))

    @cached_property
    def _aws_extras(self) -> AwsExtras:
        return AwsExtras.parse(chosen_extras(self._aws_connection, AwsExtras))
