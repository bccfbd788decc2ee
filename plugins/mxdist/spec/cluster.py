"""Where the ranks run, and the bounds of their life."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, field_validator

from mxdist.spec.base import Spec


class ClusterKind(StrEnum):
    """The platforms a job can be launched on."""

    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"


class Cluster(Spec):
    """Where the ranks run. ``local``: on the host that submits."""

    kind: ClusterKind = Field(ClusterKind.LOCAL, description="The platform.")
    slots: int | None = Field(None, ge=1, description="Ranks per host at most; default: no bound.")
    python: str | None = Field(None, description="Python of the node environment; default: $MXDIST_NODE_PYTHON.")
    workdir: str | None = Field(None, description="Scratch folder for jobs; default: $MXDIST_WORKDIR or a private one.")
    threads_per_rank: int | None = Field(None, ge=1, description="OMP threads a rank; default: cores / ranks.")
    pin_cores: bool = Field(True, description="Bind each rank to cores of its own when there are enough.")

    @field_validator("kind")
    @classmethod
    def _available(cls, kind: ClusterKind) -> ClusterKind:
        if kind is not ClusterKind.LOCAL:
            raise ValueError(f"{kind.value!r} is not yet available; use local")
        return kind


class Limits(Spec):
    """How long things may take, and how often they are tried. All times in seconds."""

    deadline_s: float | None = Field(None, gt=0, description="For one attempt, from its submission.")
    start_timeout_s: float = Field(120, gt=0, description="Until every rank has joined the world.")
    stall_timeout_s: float = Field(300, gt=0, description="Without progress of a rank, while training.")
    grace_s: float = Field(10, ge=0, description="Between asking a rank to stop and killing it.")
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


class Tracking(Spec):
    """Where the run is recorded in MLflow. Without a URI nothing is recorded, and nothing fails."""

    uri: str | None = Field(None, description="The MLflow server.")
    experiment: str = Field("mxdist", min_length=1, description="The experiment's name.")
    run_name: str | None = Field(None, description="Default: the job's name.")
    parent: str | None = Field(None, description="Key of the parent run, shared by the stages of one chain.")
    registered_model: str | None = Field(None, description="Register the model under this name.")
    tags: dict[str, str] = Field(default_factory=dict, description="Extra tags.")

    @field_validator("uri")
    @classmethod
    def _without_password(cls, uri: str | None) -> str | None:
        if uri and "@" in uri.partition("://")[2].partition("/")[0]:
            raise ValueError("carries a password; give it as MLFLOW_TRACKING_USERNAME and _PASSWORD instead")
        return uri
