"""The connection types ``mxdist_ssh`` and ``mxdist_slurm``: hosts over ssh, and the head node of a Slurm cluster."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.hook import BaseHook
from pydantic import Field

from mxdist.errors import LaunchError, MxdistError, Problem, SpecError
from mxdist.hooks.extras import chosen_extras
from mxdist.spec.base import Spec
from mxdist.spec.platforms import Ssh as SshFields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.sdk import Connection

    from mxdist.launch.hosts import HostPlan
    from mxdist.ssh import SshAccess

_NAMED = 8
_TEST_S, _TEST_ATTEMPTS = 8.0, 2
_SINFO = ("sinfo", "--noheader", "--format=%D|%T")


class SlurmExtras(Spec):
    """What is taken from the extras of an ``mxdist_slurm`` connection."""

    private_key: str | None = Field(None, description="The private key's text; default: the worker's own keys.")
    known_hosts: str | None = Field(None, description="Lines of a known_hosts file; default: the worker's own.")


class SshExtras(SlurmExtras):
    """What is taken from the extras of an ``mxdist_ssh`` connection."""

    hosts: str | None = Field(None, description="The hosts, one a line, unless the task names others.")


class SshHook(BaseHook):
    """Say which hosts there are and how they are entered, as one ``mxdist_ssh`` connection says.

    :param ssh_conn_id: the connection's id.
    """

    conn_name_attr = "ssh_conn_id"
    default_conn_name = "mxdist_ssh"
    conn_type = "mxdist_ssh"
    hook_name = "SSH hosts (mxdist)"
    extras_type: type[SlurmExtras] = SshExtras

    def __init__(self, ssh_conn_id: str = default_conn_name, *, connection: Connection | None = None) -> None:
        super().__init__()
        self.ssh_conn_id = ssh_conn_id
        if connection is not None:
            self.connection = connection

    @cached_property
    def connection(self) -> Connection:
        """The Airflow connection."""
        return self.get_connection(self.ssh_conn_id)

    @cached_property
    def extras(self) -> Any:
        """The connection's extras, checked.

        :raises SpecError: with every wrong extra.
        """
        return self.extras_type.parse(chosen_extras(self.connection, self.extras_type))

    def access(self) -> SshAccess:
        """Return how hosts are entered; the private key is in it.

        :raises SpecError: an extra is wrong.
        """
        from mxdist.ssh import SshAccess

        fields = self._fields()
        return SshAccess(
            user=fields.user,
            port=fields.port,
            key=self.extras.private_key,
            passphrase=self.connection.password or None,
            known_hosts=fields.known_hosts,
        )

    def cluster_fields(self) -> dict[str, Any]:
        """Return what this connection says of a job's cluster, without any secret: fields of ``Cluster``."""
        fields = self._fields().model_dump(mode="json", exclude_defaults=True)
        return {"kind": "ssh", "hosts": (self.extras.hosts or "").splitlines(), "ssh": fields}

    def test_connection(self) -> tuple[bool, str]:
        """Log in to every host, with its key verified; say of each that cannot be entered why."""
        from mxdist.launch.hosts import HostPlan
        from mxdist.spec.hosts import parse_inventory

        try:
            hosts = parse_inventory((self.extras.hosts or "").splitlines())
            if not hosts:
                return False, "The connection names no hosts, so there is nothing to log in to."
            self._enter([HostPlan(host.name, 1, host.user, host.port) for host in hosts])
        except (MxdistError, ValueError) as error:
            return False, str(error)
        names = ", ".join([host.name for host in hosts[:_NAMED]] + ["..."] * (len(hosts) > _NAMED))
        return True, f"Logged in to {len(hosts)} host{'s' if len(hosts) != 1 else ''}: {names}."

    def _fields(self) -> SshFields:
        connection = self.connection
        try:
            return SshFields.parse(
                {"user": connection.login, "port": connection.port, "known_hosts": self.extras.known_hosts or ()}
            )
        except SpecError as error:
            raise SpecError(f"Connection {self.ssh_conn_id!r}", error.problems) from None

    def _enter(self, hosts: Sequence[HostPlan]) -> None:
        from mxdist.ssh import Ssh

        with Ssh(self._quick()) as ssh:
            ssh.connect(hosts)

    def _quick(self) -> SshAccess:
        from dataclasses import replace

        return replace(self.access(), connect_timeout_s=_TEST_S, connect_attempts=_TEST_ATTEMPTS)


class SlurmHook(SshHook):
    """Say where Slurm's commands are, as one ``mxdist_slurm`` connection says: here, or on a head node over ssh.

    :param ssh_conn_id: the connection's id.
    """

    default_conn_name = "mxdist_slurm"
    conn_type = "mxdist_slurm"
    hook_name = "Slurm (mxdist)"
    extras_type = SlurmExtras

    @property
    def head(self) -> HostPlan | None:
        """The head node; None: Slurm's commands are on the host of the worker.

        :raises SpecError: the connection's host is none.
        """
        from mxdist.launch.hosts import HostPlan
        from mxdist.spec.hosts import parse_inventory

        name = (self.connection.host or "").strip()
        if not name:
            return None
        try:
            (host,) = parse_inventory([name])
        except ValueError as error:
            problem = Problem("host", f"must be one host: {error}")
            raise SpecError(f"Connection {self.ssh_conn_id!r}", [problem]) from None
        return HostPlan(host.name, 1, host.user, host.port)

    def cluster_fields(self) -> dict[str, Any]:
        """Return what this connection says of a job's cluster: fields of ``Cluster``."""
        return {"kind": "slurm"}

    def test_connection(self) -> tuple[bool, str]:
        """Ask ``sinfo`` for the nodes, where jobs are submitted."""
        try:
            head, _ = self.head, self.extras
            told = self._here() if head is None else self._there(head)
        except MxdistError as error:
            return False, str(error)
        rows = [line.split("|") for line in told.split() if line.count("|") == 1 and line.split("|")[0].isdigit()]
        nodes = sum(int(row[0]) for row in rows)
        states = ", ".join(f"{count} {state}" for count, state in rows)
        return True, f"Slurm answers{'' if head is None else f' on {head.name}'}: {nodes} nodes ({states or 'none'})."

    def _here(self) -> str:
        import subprocess

        try:
            done = subprocess.run(_SINFO, capture_output=True, text=True, timeout=_TEST_S, check=False)
        except FileNotFoundError:
            raise LaunchError(
                "there is no sinfo on this host.", hint="Install slurm-client, or name a head node as the host."
            ) from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"sinfo has not answered within {_TEST_S:g} s.") from None
        return _said(done.returncode, done.stdout, done.stderr)

    def _there(self, head: HostPlan) -> str:
        from mxdist.ssh import Ssh

        with Ssh(self._quick()) as ssh:
            done = ssh.run(head, _SINFO, timeout_s=_TEST_S)
        return _said(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def _said(code: int, out: str, err: str) -> str:
    if code:
        raise LaunchError(f"sinfo failed with exit code {code}: {' '.join((err or out).split())[:300]}")
    return out
