"""One job: everything that decides what is trained, where, and for how long."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator

from mxdist.errors import Problem, SpecError
from mxdist.spec.base import LABEL, Spec, digest_of
from mxdist.spec.cluster import Checkpoints, Cluster, Limits, Storage, Tracking
from mxdist.spec.dataset import Dataset
from mxdist.spec.failures import FailurePolicy
from mxdist.spec.model import Init, Model, Script
from mxdist.spec.optimizer import Decay, Optimizer
from mxdist.spec.parallelism import BatchNorm, Compression, KVStore, Parallelism, Strategy
from mxdist.spec.scaling import Scaling

_OF_SCRIPTS = (
    "strategy",
    "lossy",
    "world_size",
    "kvstore",
    "servers",
    "controller",
    "fusion_threshold_mb",
    "cycle_time_ms",
)
"""What of ``parallelism`` the world of a script is made from; a script computes by itself."""

_NO_STEPS = (
    "not with kvstore dist_async, whose servers apply each push at once, at one rate, and see no gradient whole; use "
    "kvstore dist_sync"
)


class DType(StrEnum):
    """Precision of weights, activations and gradients."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class BaseJob(Spec):
    """What every job has, whatever it does on the nodes."""

    name: str = Field(pattern=LABEL, description="Lower case, digits, hyphens; at most 52 characters.")
    cluster: Cluster = Cluster()
    parallelism: Parallelism = Parallelism()
    limits: Limits = Limits()
    failures: tuple[FailurePolicy, ...] = Field((), max_length=50, description="What failures mean, as you know them.")
    storage: Storage = Storage()
    tracking: Tracking = Tracking()

    @field_validator("parallelism")
    @classmethod
    def _fits_slots(cls, parallelism: Parallelism, info: ValidationInfo) -> Parallelism:
        capacity = info.data["cluster"].capacity if "cluster" in info.data else None
        if capacity is not None and parallelism.world_size > capacity:
            raise ValueError(f"world_size {parallelism.world_size} is more than the {capacity} slots of the cluster")
        return parallelism


class TrainingJob(BaseJob):
    """Train a model, or run a training script, on a world of ranks."""

    kind: Literal["training"] = "training"
    model: Model | None = Field(None, description="What to train with mxdist's own loop.")
    script: Script | None = Field(None, description="Or: an existing script to start on every rank.")
    dataset: Dataset | None = Field(None, description="The staged dataset; required with a model.")
    init: Init | None = Field(None, description="Start from an earlier model's weights.")
    optimizer: Optimizer = Optimizer()
    checkpoints: Checkpoints = Checkpoints()
    scaling: Scaling = Scaling()
    epochs: int = Field(1, ge=1, le=100_000, description="Passes over the training split.")
    batch_size: int = Field(64, ge=1, description="The global batch, over all ranks; see scaling.")
    seed: int = Field(0, ge=0, lt=2**31, description="Of initial weights, data order and dropout.")
    dtype: DType = Field(DType.FLOAT32, description="float32 or float64.")
    shuffle: bool = Field(True, description="A new permutation each epoch, from the seed.")
    verify_layout: bool = Field(False, description="First compare two steps with those of one process.")

    @field_validator("script")
    @classmethod
    def _one_kind_of_work(cls, script: Script | None, info: ValidationInfo) -> Script | None:
        if "model" in info.data and (info.data["model"] is None) == (script is None):
            raise ValueError("give either model or script")
        if script is not None and (unread := info.data.get("parallelism", Parallelism()).given(besides=_OF_SCRIPTS)):
            named = ", ".join(f"parallelism.{name}" for name in unread)
            raise ValueError(f"{named}: read by mxdist's own loop only, so not with a script, which does that itself")
        return script

    @field_validator("dataset")
    @classmethod
    def _model_needs_data(cls, dataset: Dataset | None, info: ValidationInfo) -> Dataset | None:
        if dataset is None and info.data.get("model") is not None:
            raise ValueError("is required to train a model; `mxdist stage` makes one")
        return dataset

    @field_validator("init")
    @classmethod
    def _only_for_models(cls, init: Init | None, info: ValidationInfo) -> Init | None:
        if init is not None and info.data.get("script") is not None:
            raise ValueError("goes with a model; a script loads its own weights")
        return init

    @field_validator("optimizer")
    @classmethod
    def _servers_can(cls, optimizer: Optimizer, info: ValidationInfo) -> Optimizer:
        parallelism = info.data.get("parallelism")
        if parallelism is None or not parallelism.servers_update or info.data.get("script") is not None:
            return optimizer
        wanted = {
            "clip_norm": optimizer.clip_norm is not None,
            "schedule.decay": optimizer.schedule.decay is not Decay.CONSTANT,
            "schedule.warmup_steps": optimizer.schedule.warmup_steps > 0,
        }
        if names := ", ".join(name for name, given in wanted.items() if given):
            raise ValueError(f"{names}: {_NO_STEPS}")
        return optimizer

    @field_validator("scaling")
    @classmethod
    def _one_warm_up(cls, scaling: Scaling, info: ValidationInfo) -> Scaling:
        if scaling.warmup_steps and "optimizer" in info.data and info.data["optimizer"].schedule.warmup_steps:
            raise ValueError("give warmup_steps here or in optimizer.schedule, not in both")
        if scaling.warmup_steps and "parallelism" in info.data and info.data["parallelism"].servers_update:
            raise ValueError(f"warmup_steps: {_NO_STEPS}")
        return scaling

    @field_validator("batch_size")
    @classmethod
    def _divisible(cls, batch_size: int, info: ValidationInfo) -> int:
        if not {"parallelism", "scaling"} <= info.data.keys():
            return batch_size
        parallelism = info.data["parallelism"]
        trained, replicas = info.data["scaling"].batch_size(batch_size, parallelism.copies), parallelism.replicas
        if info.data.get("script") is not None:
            return batch_size
        if trained % replicas:
            below, above = trained // replicas * replicas, -(-trained // replicas) * replicas
            near = f"{below} or {above}" if below else f"{above}"
            what = "parallelism.world_size" if not parallelism.across_processes else "the replicas"
            scaled = "" if trained == batch_size else f"; scaling makes {trained} of {batch_size}"
            raise ValueError(f"{trained} is not divisible by {what} {replicas}; use {near}{scaled}")
        _in_parts(trained, parallelism)
        return batch_size

    @field_validator("dtype")
    @classmethod
    def _travels_whole(cls, dtype: DType, info: ValidationInfo) -> DType:
        parallelism = info.data.get("parallelism")
        if parallelism is None or dtype is DType.FLOAT32:
            return dtype
        if parallelism.strategy is Strategy.PARAMETER_SERVER:
            raise ValueError("must be float32: MXNet's parameter servers compute in float32")
        return dtype

    @field_validator("verify_layout")
    @classmethod
    def _can_be_verified(cls, verify: bool, info: ValidationInfo) -> bool:
        if not verify or "parallelism" not in info.data:
            return verify
        if info.data.get("script") is not None:
            raise ValueError("goes with a model; a script asks for it by Worker.verify")
        if different := _unlike_one_process(info.data["parallelism"]):
            raise ValueError(f"{different} trains another model than one process does: nothing to compare it with")
        return verify

    def effective(self) -> TrainingJob:
        """Return the job as it is trained in its layout: with the batch and rate that ``scaling`` makes of them."""
        scaling, copies = self.scaling, self.parallelism.copies
        changed = {
            "batch_size": scaling.batch_size(self.batch_size, copies),
            "optimizer": scaling.optimizer(self.optimizer, copies),
            "scaling": Scaling(),
        }
        return self.model_copy(update=changed)

    def training_digest(self) -> str:
        """Return the digest of all that decides the weights: not where the job runs, or how it is watched.

        Of the layout counts what ``Parallelism.beyond_the_law`` says: any other one trains the same weights.
        """
        left_out = {"cluster", "parallelism", "limits", "failures", "storage", "tracking", "checkpoints", "name"}
        left_out |= {"verify_layout"}
        document = self.effective().model_dump(mode="json", exclude=left_out)
        other = self.parallelism.beyond_the_law()
        return digest_of({**document, "parallelism": other} if other else document)


def _unlike_one_process(parallelism: Parallelism) -> str:
    """Return what makes each step another one than one process makes, by no stated bound; "" if nothing does."""
    if parallelism.batch_norm is BatchNorm.LOCAL:
        return "batch_norm local"
    if parallelism.strategy is Strategy.PARAMETER_SERVER and parallelism.kvstore is KVStore.DIST_ASYNC:
        return "dist_async"
    return "2bit compression" if parallelism.compression is Compression.TWO_BIT else ""


def _in_parts(batch_size: int, parallelism: Parallelism) -> None:
    """Refuse a batch whose shares have fewer rows than the parts that they are computed in."""
    share = batch_size // parallelism.replicas
    for field, parts in (("micro_batches", parallelism.micro_batches), ("accumulate", parallelism.accumulate)):
        if share < parts:
            raise ValueError(f"a rank's share of {share} rows is less than parallelism.{field} {parts}")


class EvaluationJob(BaseJob):
    """Score models on the same frozen split, on the node side."""

    kind: Literal["evaluation"] = "evaluation"
    models: dict[str, str] = Field(min_length=1, description="Role (challenger, champion) -> model URI.")
    dataset: Dataset = Field(description="The staged dataset.")
    split: str = Field("test", description="The split that nobody trained on.")
    batch_size: int = Field(256, ge=1)

    @field_validator("parallelism")
    @classmethod
    def _one_process(cls, parallelism: Parallelism) -> Parallelism:
        if given := parallelism.given():
            raise ValueError(f"{', '.join(given)}: leave out; an evaluation runs in one process, on one device")
        return parallelism


Job = Annotated[TrainingJob | EvaluationJob, Field(discriminator="kind")]
"""Any job that a supervisor can run."""

_KINDS: dict[str, type[TrainingJob | EvaluationJob]] = {"training": TrainingJob, "evaluation": EvaluationJob}


def parse_job(document: object, *, stored: bool = False) -> TrainingJob | EvaluationJob:
    """Return the job that a JSON or YAML document describes; ``kind`` defaults to ``training``.

    :param stored: it was accepted when it was written, perhaps by an earlier version.
    :raises SpecError: with every wrong field, each by its path.
    """
    if not isinstance(document, dict):
        raise SpecError("The job", [Problem("", f"must be a mapping, not {type(document).__name__}")])
    kind = document.get("kind", "training")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise SpecError("The job", [Problem("kind", f"unknown kind {kind!r}; known are {', '.join(_KINDS)}")])
    return _KINDS[kind].parse(document, stored=stored)


def job_schema() -> dict[str, object]:
    """Return the JSON Schema of a job file."""
    return TypeAdapter(Job).json_schema()
