"""Hosts over ssh, for both sides: the launcher's and the supervisor's.

Connections are opened to all hosts at once, one a host, which all commands share. Host keys are verified, always.
asyncssh takes a second to load, so it is loaded when the first connection is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxdist.ssh.access import SshAccess, SshHost

if TYPE_CHECKING:
    from mxdist.ssh.connections import Done, Ssh
    from mxdist.ssh.process import SshProcess

__all__ = ["Done", "Ssh", "SshAccess", "SshHost", "SshProcess"]


def __getattr__(name: str) -> Any:
    if name in ("Done", "Ssh", "SshProcess"):
        from mxdist.ssh import connections

        return getattr(connections, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
