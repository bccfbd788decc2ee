"""One job: everything that decides what is trained, where, and for how long."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from mxdist.errors import Problem, SpecError
from mxdist.spec.base import LABEL, Spec
from mxdist.spec.cluster import Checkpoints, Cluster, Limits, Storage, Tracking
from mxdist.spec.dataset import Dataset
from mxdist.spec.model import Init, Model, Script
from mxdist.spec.optimizer import Optimizer
from mxdist.spec.parallelism import Parallelism


class DType(StrEnum):
    """Precision of weights, activations and gradients."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class BaseJob(Spec):
    """What every job has, whatever it does on the nodes."""

    name: str = Field(pattern=LABEL, description="Lower case, digits, hyphens; at most 52 characters.")
    cluster: Cluster = Field(default_factory=Cluster)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    limits: Limits = Field(default_factory=Limits)
    storage: Storage = Field(default_factory=Storage)
    tracking: Tracking = Field(default_factory=Tracking)

    @model_validator(mode="after")
    def _fits_slots(self) -> Self:
        slots = self.cluster.slots
        if slots is not None and self.parallelism.world_size > slots:
            raise ValueError(f"parallelism.world_size {self.parallelism.world_size} needs more than cluster.slots {slots}")
        return self


class TrainingJob(BaseJob):
    """Train a model, or run a training script, on a world of ranks."""

    kind: Literal["training"] = "training"
    model: Model | None = Field(None, description="What to train with mxdist's own loop.")
    script: Script | None = Field(None, description="Or: an existing script to start on every rank.")
    dataset: Dataset | None = Field(None, description="The staged dataset; required with a model.")
    init: Init | None = Field(None, description="Start from an earlier model's weights.")
    optimizer: Optimizer = Field(default_factory=Optimizer)
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)
    epochs: int = Field(1, ge=1, le=100_000, description="Passes over the training split.")
    batch_size: int = Field(64, ge=1, description="The global batch, over all ranks.")
    seed: int = Field(0, ge=0, lt=2**31, description="Of initial weights, data order and dropout.")
    dtype: DType = Field(DType.FLOAT32, description="float32 or float64.")
    shuffle: bool = Field(True, description="A new permutation each epoch, from the seed.")

    @model_validator(mode="after")
    def _one_kind_of_work(self) -> Self:
        if (self.model is None) == (self.script is None):
            raise ValueError("give either model or script")
        if self.model is not None and self.dataset is None:
            raise ValueError("dataset: is required to train a model")
        if self.script is not None and self.init is not None:
            raise ValueError("init: a script loads its own weights")
        return self

    @model_validator(mode="after")
    def _divisible_batch(self) -> Self:
        ranks = self.parallelism.world_size
        if self.model is not None and self.batch_size % ranks:
            below, above = self.batch_size // ranks * ranks, -(-self.batch_size // ranks) * ranks
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"batch_size {self.batch_size} is not divisible by world_size {ranks}; use {near}")
        return self

    def training_digest(self) -> str:
        """Return the digest of all that decides the weights: not where the job runs, or how it is watched."""
        return self.digest(exclude=("cluster", "parallelism", "limits", "storage", "tracking", "checkpoints", "name"))


class EvaluationJob(BaseJob):
    """Score models on the same frozen split, on the node side."""

    kind: Literal["evaluation"] = "evaluation"
    models: dict[str, str] = Field(min_length=1, description="Role (challenger, champion) -> model URI.")
    dataset: Dataset = Field(description="The staged dataset.")
    split: str = Field("test", description="The split that nobody trained on.")
    batch_size: int = Field(256, ge=1)

    @model_validator(mode="after")
    def _one_rank(self) -> Self:
        if self.parallelism.world_size != 1:
            raise ValueError("parallelism.world_size must be 1: an evaluation runs in one process")
        return self


Job = Annotated[TrainingJob | EvaluationJob, Field(discriminator="kind")]
"""Any job that a supervisor can run."""

_KINDS: dict[str, type[TrainingJob | EvaluationJob]] = {"training": TrainingJob, "evaluation": EvaluationJob}


def parse_job(document: object) -> TrainingJob | EvaluationJob:
    """Return the job that a JSON or YAML document describes; ``kind`` defaults to ``training``.

    :raises SpecError: with every wrong field, each by its path.
    """
    if not isinstance(document, dict):
        raise SpecError("The job", [Problem("", f"must be a mapping, not {type(document).__name__}")])
    kind = document.get("kind", "training")
    if kind not in _KINDS:
        raise SpecError("The job", [Problem("kind", f"unknown kind {kind!r}; known are {', '.join(_KINDS)}")])
    return _KINDS[kind].parse(document)


def job_schema() -> dict[str, object]:
    """Return the JSON Schema of a job file."""
    return TypeAdapter(Job).json_schema()
