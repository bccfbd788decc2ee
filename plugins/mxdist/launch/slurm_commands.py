"""Slurm's own commands, run on this host or on a head node over ssh. Secrets go through environment and input only."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mxdist.errors import LaunchError
from mxdist.launch.hosts import HostPlan
from mxdist.ssh import SshAccess

if TYPE_CHECKING:
    from mxdist.ssh import Ssh

_TIMEOUT_S = 60.0
_KEPT = ("HOME", "LANG", "LOGNAME", "PATH", "SLURM_CONF", "SLURM_JWT", "TZ", "USER")
"""What Slurm's commands may know of our environment: SBATCH_* and SLURM_* would override what the script asks for."""

_CLEAN = r"""
for name in $(env | sed -nE 's/^((SBATCH|SCANCEL|SLURM|SQUEUE)_[A-Za-z0-9_]*)=.*/\1/p'); do
    case $name in
        SLURM_CONF | SLURM_JWT) ;;
        *) (unset "$name") 2>/dev/null && unset "$name" ;;
    esac
done
"""
"""The same for what a profile has set; what it has made read-only cannot be unset, and would end the shell."""

_END = "MXDIST_INPUT_END"


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    returncode: int
    out: str
    err: str


class Commands(Protocol):
    """Where Slurm's commands are."""

    where: str

    def run(self, command: Sequence[str], *, text: str = "", environment: Mapping[str, str] | None = None) -> Ran:
        """Run a command to its end.

        :param text: its standard input.
        :param environment: variables for it beside the few that it needs; may be secret.
        :raises LaunchError: it cannot be run, or takes longer than a minute.
        """

    def kept(self) -> AbstractContextManager[object]:
        """Keep the way there open for several commands of this thread."""


class Here:
    """On this host."""

    where = "this host"

    def run(self, command: Sequence[str], *, text: str = "", environment: Mapping[str, str] | None = None) -> Ran:
        """See ``Commands``."""
        kept = {name: value for name, value in os.environ.items() if name in _KEPT}
        try:
            done = subprocess.run(
                command, input=text.encode(), env={**kept, **(environment or {})}, capture_output=True,
                timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise LaunchError(
                f"there is no {command[0]} on this host.",
                hint="Install slurm-client, with the cluster's slurm.conf and munge key, or name a head node.",
                retryable=False,
            ) from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{command[0]} has not answered within {_TIMEOUT_S:g} s.", hint=_ASK) from None
        return Ran(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def kept(self) -> AbstractContextManager[object]:
        """See ``Commands``."""
        return contextlib.nullcontext()


_ASK = "Does the controller live? `scontrol ping` says so."


class There:
    """On a head node, over ssh. A shell there reads everything from its input: its command line says nothing."""

    def __init__(self, head: HostPlan, access: SshAccess) -> None:
        self.where = head.name
        self._head, self._access = head, access
        self._mine = threading.local()

    def run(self, command: Sequence[str], *, text: str = "", environment: Mapping[str, str] | None = None) -> Ran:
        """See ``Commands``."""
        end = f"{_END}_{uuid.uuid4().hex}"  # no line of a job's own can be it
        lines = [_CLEAN, *(f"export {name}={shlex.quote(value)}" for name, value in (environment or {}).items())]
        lines += [f"{shlex.join(command)} <<'{end}'", text.removesuffix("\n"), end, ""]
        with self.kept() as ssh:
            done = ssh.run(self._head, ["sh", "-l", "-s"], stdin="\n".join(lines).encode(), timeout_s=_TIMEOUT_S)
        return Ran(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    @contextmanager
    def kept(self) -> Iterator[Ssh]:
        """See ``Commands``."""
        from mxdist.ssh import Ssh

        known: Ssh | None = getattr(self._mine, "ssh", None)
        if known is not None:
            yield known
            return
        with Ssh(self._access) as ssh:
            self._mine.ssh = ssh
            try:
                yield ssh
            finally:
                self._mine.ssh = None


def commands_at(head: tuple[HostPlan, SshAccess] | None) -> Commands:
    """Return where Slurm's commands are.

    :param head: a head node and how it is entered; None: here.
    """
    return Here() if head is None else There(*head)
