"""Where the ranks run, and the bounds of their life."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum

from pydantic import Field, ValidationInfo, field_validator

from mxdist.spec.base import STORED, Spec
from mxdist.spec.hosts import MOST_HOSTS, Host, parse_inventory
from mxdist.spec.platforms import Kubernetes, Slurm, Ssh


class ClusterKind(StrEnum):
    """The platforms a job can be launched on."""

    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


class Code(StrEnum):
    """How mxdist and the user's code reach the hosts."""

    BUNDLE = "bundle"
    SHARED = "shared"
    IMAGE = "image"


_GOES_WITH: dict[str, tuple[ClusterKind, ...]] = {
    "nodes": (ClusterKind.SLURM, ClusterKind.KUBERNETES),
    "hosts": (ClusterKind.SSH,),
    "interface": (ClusterKind.SSH, ClusterKind.SLURM, ClusterKind.KUBERNETES),
    "ssh": (ClusterKind.SSH,),
    "slurm": (ClusterKind.SLURM,),
    "kubernetes": (ClusterKind.KUBERNETES,),
    "code": (ClusterKind.SSH, ClusterKind.SLURM, ClusterKind.KUBERNETES),
    "connection": (ClusterKind.SSH, ClusterKind.SLURM, ClusterKind.KUBERNETES),
}
"""Fields that mean something on some platforms only."""


class Cluster(Spec):
    """Where the ranks run. ``local``: on the host that submits."""

    kind: ClusterKind = Field(ClusterKind.LOCAL, description="The platform.")
    slots: int | None = Field(
        None, ge=1, description="Ranks per host at most; default: no bound on one host, else an equal share."
    )
    nodes: int | None = Field(
        None, ge=1, le=MOST_HOSTS, description="slurm, kubernetes: hosts; default: as slots need."
    )
    hosts: tuple[str, ...] = Field((), description="ssh: hosts, one a line: node1:2, node[2-4] slots=2, user@host.")
    interface: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.:/-]{1,64}$",
        description="Network of the ranks: a device or a subnet; default: found.",
    )
    code: Code = Field(
        Code.BUNDLE, description="How code gets to the hosts: bundle (by digest, run store), shared, image."
    )
    python: str | None = Field(None, description="Python of the node environment; default: $MXDIST_NODE_PYTHON.")
    workdir: str | None = Field(None, description="Scratch folder for jobs; default: $MXDIST_WORKDIR or a private one.")
    threads_per_rank: int | None = Field(None, ge=1, description="OMP threads a rank; default: cores / ranks.")
    pin_cores: bool = Field(True, description="Bind each rank to cores of its own when there are enough.")
    price_per_slot_hour: float | None = Field(
        None, ge=0, description="For the plan's estimate of the cost, in any currency."
    )
    connection: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,200}$",
        description="Airflow's connection to the platform; default: the one that the mxdist connection names.",
    )
    ssh: Ssh = Ssh()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()

    @property
    def inventory(self) -> tuple[Host, ...]:
        """The hosts of an ssh cluster, each with its slots as far as they are known."""
        return tuple(replace(host, slots=host.slots or self.slots) for host in parse_inventory(self.hosts))

    @property
    def capacity(self) -> int | None:
        """Ranks that the platform takes; None where nothing bounds them."""
        if self.kind is ClusterKind.SSH:
            slots = [host.slots for host in self.inventory]
            return None if None in slots else sum(slot or 0 for slot in slots)
        if self.kind is ClusterKind.LOCAL:
            return self.slots
        return self.nodes * self.slots if self.nodes and self.slots else None

    @field_validator("hosts", mode="before")
    @classmethod
    def _as_lines(cls, hosts: object) -> object:
        return hosts.splitlines() if isinstance(hosts, str) else hosts

    @field_validator("hosts")
    @classmethod
    def _readable(cls, hosts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        found = parse_inventory(hosts)
        if not found and info.data.get("kind") is ClusterKind.SSH:
            raise ValueError("is required for kind ssh: at least one host")
        return hosts

    @field_validator("kubernetes")
    @classmethod
    def _with_image(cls, kubernetes: Kubernetes, info: ValidationInfo) -> Kubernetes:
        if info.data.get("kind") is ClusterKind.KUBERNETES and not kubernetes.image:
            raise ValueError("image is required for kind kubernetes")
        return kubernetes

    @field_validator(*_GOES_WITH)
    @classmethod
    def _means_something(cls, value: object, info: ValidationInfo) -> object:
        field, kind = str(info.field_name), info.data.get("kind")
        if kind is None or value == cls.model_fields[field].default or kind in _GOES_WITH[field]:
            return value
        raise ValueError(f"goes with kind {', '.join(_GOES_WITH[field])}, not {kind.value}")


class Limits(Spec):
    """How long things may take, and how often they are tried. All times in seconds."""

    deadline_s: float | None = Field(None, gt=0, description="For one attempt, from its submission.")
    start_timeout_s: float = Field(120, gt=0, description="Until every rank has joined the world.")
    stall_timeout_s: float = Field(300, gt=0, description="Without progress of a rank, while training.")
    grace_s: float = Field(10, ge=0, description="Between asking a rank to stop and killing it.")
    link_timeout_s: float = Field(
        20, gt=0, description="Without a word from another host: it then counts as lost, and ends its ranks itself."
    )
    max_restarts: int = Field(2, ge=0, description="World restarts within one attempt.")


class Checkpoints(Spec):
    """When training state is saved, and how much of it is kept."""

    every_epochs: int | None = Field(1, ge=1, description="Save at the end of every so many epochs.")
    every_steps: int | None = Field(None, ge=1, description="Save after every so many optimizer steps as well.")
    keep: int = Field(2, ge=1, description="Complete checkpoints kept.")


class Storage(Spec):
    """How to reach S3. Credentials are never part of a job: they travel beside it."""

    endpoint_url: str | None = Field(None, description="For servers other than AWS.")
    region: str | None = Field(None, description="Default: $AWS_DEFAULT_REGION or us-east-1.")

    @field_validator("endpoint_url")
    @classmethod
    def _is_an_address(cls, url: str | None, info: ValidationInfo) -> str | None:
        return _address(url, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", info)


class Tracking(Spec):
    """Where the run is recorded in MLflow. Without a URI nothing is recorded, and nothing fails."""

    uri: str | None = Field(None, description="The MLflow server.")
    experiment: str = Field("mxdist", min_length=1, description="The experiment's name.")
    run_name: str | None = Field(None, description="Default: the job's name.")
    parent: str | None = Field(None, description="Key of the parent run, shared by the stages of one chain.")
    registered_model: str | None = Field(None, description="Register the model under this name.")
    tags: dict[str, str] = Field(default_factory=dict, description="Extra tags.")
    wait_s: float = Field(
        60.0, ge=1, le=3600, description="How long a job that is through waits for MLflow, on its hosts, in seconds."
    )

    @field_validator("registered_model")
    @classmethod
    def _can_be_registered(cls, name: str | None, info: ValidationInfo) -> str | None:
        stored = info.context and info.context.get(STORED)  # then it is MLflow that says so, at the end
        if name is not None and not stored and (problem := misnamed(name)):
            raise ValueError(problem)
        return name

    @field_validator("uri")
    @classmethod
    def _is_an_address(cls, uri: str | None, info: ValidationInfo) -> str | None:
        return _address(uri, "MLFLOW_TRACKING_USERNAME and _PASSWORD", info)


def misnamed(registered_model: str) -> str:
    """Return why MLflow would refuse to register a model under this name; empty: it would not."""
    if not registered_model.strip():
        return "is empty; MLflow wants a name"
    if set(registered_model) & set("/:"):
        return f"{registered_model!r} has a / or a :, which MLflow allows in no model's name"
    return ""


def _address(address: str | None, instead: str, info: ValidationInfo) -> str | None:
    """Return an address as it is; one with a password or a token would be kept and shown with the job."""
    if address is None or (info.context and info.context.get(STORED)):
        return address
    if "@" in (address.partition("://")[2] or address).partition("/")[0]:
        raise ValueError(f"carries a password; give it as {instead} instead")
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", address):
        raise ValueError("must be http://HOST[:PORT][/PATH] or https://..., and nothing after it")
    return address
