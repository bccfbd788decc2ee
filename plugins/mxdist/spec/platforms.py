"""What each platform must be told beside hosts and slots. Credentials are never part of it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

from mxdist.spec.base import LABEL, Spec

_WORD = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f'\"\\`$;|&<>#]+$", max_length=255)]
_EXPRESSION = r"^[A-Za-z0-9_.,:=&|*()\[\]-]{1,255}$"
_KUBERNETES_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
_KNOWN_HOST = re.compile(r"^(@\S+ )?\S+ (ssh-|ecdsa-|sk-)\S+ [A-Za-z0-9+/=]+( .*)?$")


class Ssh(Spec):
    """How hosts are reached. Keys come from the connection, an agent or the user's own files."""

    user: str | None = Field(None, description="Who to log in as; default: the connection's, or who submits.")
    port: int | None = Field(None, ge=1, le=65535, description="Of sshd; default: the connection's, or 22.")
    known_hosts: tuple[str, ...] = Field(
        (), description="Lines of a known_hosts file; default: the connection's, or the user's."
    )
    connect_timeout_s: float = Field(10, gt=0, description="For one attempt to connect.")
    connect_attempts: int = Field(4, ge=1, description="Attempts to connect to a host, with growing pauses.")

    @field_validator("known_hosts", mode="before")
    @classmethod
    def _as_lines(cls, lines: object) -> object:
        return lines.splitlines() if isinstance(lines, str) else lines

    @field_validator("known_hosts")
    @classmethod
    def _well_formed(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        kept = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        wrong = [line for line in kept if not _KNOWN_HOST.match(line)]
        if wrong:
            raise ValueError(f"{wrong[0][:40]!r} is no line of a known_hosts file (host, type, key)")
        return kept


class Slurm(Spec):
    """What is asked of Slurm for a job; all else is the partition's default."""

    partition: _WORD | None = Field(None, description="sbatch --partition.")
    account: _WORD | None = Field(None, description="sbatch --account.")
    qos: _WORD | None = Field(None, description="sbatch --qos.")
    gres: _WORD | None = Field(None, description="sbatch --gres, for each node.")
    gpus_per_node: _WORD | None = Field(None, description="sbatch --gpus-per-node: 4 or a100:4.")
    exclusive: bool = Field(False, description="sbatch --exclusive.")
    constraint: str | None = Field(
        None, pattern=_EXPRESSION, description="sbatch --constraint: a feature, or a&b, [x|y]."
    )
    reservation: _WORD | None = Field(None, description="sbatch --reservation.")
    memory: _WORD | None = Field(None, description="sbatch --mem, for each node.")
    cpus_per_slot: int | None = Field(None, ge=1, description="sbatch --cpus-per-task.")
    time_limit_s: int | None = Field(None, ge=60, description="sbatch --time; default: the partition's.")
    requeue: bool = Field(True, description="Let Slurm start the job again after a lost node or preemption.")
    output: _WORD | None = Field(None, description="sbatch --output; default: /tmp/%x-%j.out on the first node.")
    setup: tuple[str, ...] = Field((), description="Shell lines before all else on the first node: module load cuda.")

    @field_validator("setup", mode="before")
    @classmethod
    def _as_lines(cls, lines: object) -> object:
        return lines.splitlines() if isinstance(lines, str) else lines

    @field_validator("setup")
    @classmethod
    def _single_lines(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        if any("\n" in line or "\0" in line or line.lstrip().startswith("#SBATCH") for line in lines):
            raise ValueError("holds a line that is none, or an #SBATCH line: cluster.slurm has fields for those")
        return lines


class Kubernetes(Spec):
    """The MPIJob that is made. Credentials come from a Secret, by its name."""

    namespace: str = Field("default", pattern=LABEL, description="Where the MPIJob is made.")
    image: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}$", description="Node image; required."
    )
    image_pull_secrets: tuple[str, ...] = Field((), description="Names of Secrets for the registry.")
    service_account: str | None = Field(None, pattern=_KUBERNETES_NAME, description="Of all pods.")
    secret: str | None = Field(
        None, pattern=_KUBERNETES_NAME, description="Secret whose keys are environment variables: S3, MLflow."
    )
    queue: str | None = Field(None, pattern=LABEL, description="Kueue's LocalQueue; the job then starts suspended.")
    priority_class: str | None = Field(None, pattern=_KUBERNETES_NAME, description="Of the pods, and of the gang.")
    gang_timeout_s: int | None = Field(None, ge=1, description="How long the gang scheduler may wait for all pods.")
    gpus_per_worker: int = Field(0, ge=0, description="nvidia.com/gpu of each worker.")
    cpus_per_worker: str | None = Field(None, pattern=_QUANTITY, description="cpu of each worker, as 4 or 500m.")
    memory_per_worker: str | None = Field(None, pattern=_QUANTITY, description="memory of each worker, as 16Gi.")
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels that the nodes must have.")
