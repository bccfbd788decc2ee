"""How the work is spread over ranks and devices."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from mxdist.spec.base import Spec


class Strategy(StrEnum):
    """The ways to spread one training over devices and processes."""

    ALLREDUCE = "allreduce"
    PARAMETER_SERVER = "parameter_server"
    DEVICES = "devices"
    MODEL = "model"
    PIPELINE = "pipeline"
    HYBRID = "hybrid"


class Lossy(StrEnum):
    """What makes a training differ from that of one process; a job that wants it must say so."""

    BATCH_NORM = "batch_norm"
    COMPRESSION = "compression"
    DIST_ASYNC = "dist_async"
    DROPOUT = "dropout"


class Controller(StrEnum):
    """What Horovod's ranks talk through."""

    GLOO = "gloo"
    MPI = "mpi"


class KVStore(StrEnum):
    """MXNet's parameter servers: who waits for whom."""

    DIST_SYNC = "dist_sync"
    DIST_DEVICE_SYNC = "dist_device_sync"
    DIST_ASYNC = "dist_async"


class Compression(StrEnum):
    """What is done to gradients on their way; all but none are lossy."""

    NONE = "none"
    FP16 = "fp16"
    TWO_BIT = "2bit"


class Inside(StrEnum):
    """What each rank of a hybrid does by itself."""

    DEVICES = "devices"
    MODEL = "model"
    PIPELINE = "pipeline"


class Balance(StrEnum):
    """What is made as equal as can be between the stages when there are no explicit cuts."""

    PARAMETERS = "parameters"
    ACTIVATIONS = "activations"
    TIME = "time"


class PipelineSchedule(StrEnum):
    """In which order a stage works on its micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"


class Across(StrEnum):
    """Where the stages of a pipeline live."""

    DEVICES = "devices"
    PROCESSES = "processes"


class BatchNorm(StrEnum):
    """Which statistics batch normalisation uses on more than one rank."""

    SYNCHRONISED = "synchronised"
    FROZEN = "frozen"
    LOCAL = "local"


_STAGED = (Strategy.MODEL, Strategy.PIPELINE, Strategy.HYBRID)
_GOES_WITH: dict[str, tuple[Strategy, ...]] = {
    "accumulate": (Strategy.ALLREDUCE, Strategy.PARAMETER_SERVER),
    "shared_memory_mb": (Strategy.ALLREDUCE, Strategy.PIPELINE, Strategy.HYBRID),
    "kvstore": (Strategy.PARAMETER_SERVER,),
    "servers": (Strategy.PARAMETER_SERVER,),
    "inside": (Strategy.HYBRID,),
    "devices": (Strategy.DEVICES, Strategy.HYBRID),
    "cuts": _STAGED,
    "stages": _STAGED,
    "balance": _STAGED,
    "across": (Strategy.PIPELINE, Strategy.HYBRID),
    "micro_batches": (Strategy.PIPELINE, Strategy.HYBRID),
    "schedule": (Strategy.PIPELINE, Strategy.HYBRID),
}
"""Fields that mean something with some strategies only."""

_GOES_INSIDE: dict[str, tuple[Inside, ...]] = {
    "devices": (Inside.DEVICES,),
    "cuts": (Inside.MODEL, Inside.PIPELINE),
    "stages": (Inside.MODEL, Inside.PIPELINE),
    "balance": (Inside.MODEL, Inside.PIPELINE),
    "across": (Inside.PIPELINE,),
    "micro_batches": (Inside.PIPELINE,),
    "schedule": (Inside.PIPELINE,),
    "shared_memory_mb": (Inside.PIPELINE,),
}
"""The same for what a hybrid does inside."""

_COMPRESSES = {
    Compression.FP16: (Strategy.ALLREDUCE, Strategy.HYBRID),
    Compression.TWO_BIT: (Strategy.PARAMETER_SERVER,),
}


class Parallelism(Spec):
    """The world of ranks, in Horovod's words."""

    strategy: Strategy = Field(Strategy.ALLREDUCE, description="How gradients meet.")
    lossy: tuple[Lossy, ...] = Field((), description="What may differ from one process: said here on purpose.")
    inside: Inside | None = Field(None, description="hybrid: what each rank does by itself.")
    devices: int | None = Field(None, ge=1, le=64, description="devices: how many each rank has.")
    cuts: tuple[str, ...] = Field((), description="model, pipeline: the layer that each later stage begins with.")
    stages: int | None = Field(None, ge=1, le=64, description="model, pipeline: 2 parts or more, cut by balance.")
    balance: Balance = Field(Balance.PARAMETERS, description="model, pipeline: what the stages share equally.")
    across: Across = Field(Across.DEVICES, description="pipeline: stages on devices of one rank, or one a rank.")
    micro_batches: int = Field(1, ge=1, le=4096, description="pipeline: parts of a rank's share of the batch.")
    schedule: PipelineSchedule = Field(PipelineSchedule.ONE_F_ONE_B, description="pipeline: gpipe or 1f1b.")
    world_size: int = Field(1, ge=1, le=4096, description="Number of ranks over all hosts.")
    accumulate: int = Field(1, ge=1, le=4096, description="Parts that a rank computes its share in, one by one.")
    kvstore: KVStore = Field(KVStore.DIST_SYNC, description="parameter_server: MXNet's kind of store.")
    servers: int = Field(1, ge=1, le=1024, description="parameter_server: how many servers.")
    compression: Compression = Field(Compression.NONE, description="Of gradients between ranks.")
    compression_threshold: float = Field(0.5, gt=0, description="2bit: what a gradient must reach to be sent.")
    batch_norm: BatchNorm | None = Field(None, description="Its statistics on several ranks; none: refused there.")
    controller: Controller = Field(Controller.GLOO, description="What Horovod's ranks talk through.")
    fusion_threshold_mb: int = Field(64, ge=0, description="Horovod's fusion buffer, in MiB.")
    cycle_time_ms: float = Field(1.0, gt=0, description="Horovod's cycle time, in milliseconds.")
    shared_memory_mb: float | None = Field(
        8.0,
        ge=0,
        description="Gradients from so many MiB on are summed in memory of their host; none: all through Horovod.",
    )

    @property
    def stage_count(self) -> int:
        """Stages of the model; 1 when it is not cut."""
        return len(self.cuts) + 1 if self.cuts else self.stages or 1

    @property
    def staged(self) -> bool:
        """Whether the network is cut into stages."""
        return self.strategy in (Strategy.MODEL, Strategy.PIPELINE) or self.inside in (Inside.MODEL, Inside.PIPELINE)

    @property
    def servers_update(self) -> bool:
        """Whether optimizer steps are made by parameter servers, one for each push of a rank."""
        return self.strategy is Strategy.PARAMETER_SERVER and self.kvstore is KVStore.DIST_ASYNC

    @property
    def across_processes(self) -> bool:
        """Whether each stage is a rank of its own."""
        return self.across is Across.PROCESSES

    @property
    def devices_per_rank(self) -> int:
        """Devices that each rank uses: replicas of the network, or stages of it."""
        return self.devices or (1 if self.across_processes else self.stage_count)

    @property
    def replicas(self) -> int:
        """Copies of the model that train on different rows: what a global batch is shared by."""
        return self.world_size // self.stage_count if self.across_processes else self.world_size

    @property
    def copies(self) -> int:
        """Copies of the model that compute different rows at the same time: replicas, times the devices of each."""
        return self.replicas * (self.devices or 1)

    def given(self, *, besides: Iterable[str] = ()) -> list[str]:
        """Return the fields that are not at their defaults.

        :param besides: fields that do not count.
        """
        fields = type(self).model_fields
        return [name for name in fields if name not in set(besides) and getattr(self, name) != fields[name].default]

    def beyond_the_law(self) -> dict[str, Any]:
        """Return what makes the trained weights others than those of one process; all else of a layout does not.

        Synchronised statistics are those of one process with Gluon's own layers. What ``lossy`` allows counts where
        it happens: dropout, where the work is divided.
        """
        found: dict[str, Any] = {}
        if self.batch_norm in (BatchNorm.FROZEN, BatchNorm.LOCAL):
            found["batch_norm"] = self.batch_norm.value
        if self.compression is not Compression.NONE:
            found["compression"] = self.compression.value
        if self.compression is Compression.TWO_BIT:
            found["compression_threshold"] = self.compression_threshold
        if self.servers_update:
            found["kvstore"] = self.kvstore.value
        if Lossy.DROPOUT in self.lossy and self.parts > 1:
            found["lossy"] = [Lossy.DROPOUT.value]
        return found

    @property
    def parts(self) -> int:
        """Parts that a step's work is divided into; each draws random numbers of its own."""
        return self.world_size * self.devices_per_rank * self.accumulate * self.micro_batches

    @field_validator(*_GOES_WITH)
    @classmethod
    def _means_something(cls, value: object, info: ValidationInfo) -> object:
        field, strategy, inside = str(info.field_name), info.data.get("strategy"), info.data.get("inside")
        if strategy is None or value == cls.model_fields[field].default:
            return value
        if strategy not in _GOES_WITH[field]:
            raise ValueError(f"goes with strategy {_names(_GOES_WITH[field])}, not {strategy.value}")
        if inside is not None and inside not in _GOES_INSIDE.get(field, (inside,)):
            raise ValueError(f"goes with inside {_names(_GOES_INSIDE[field])}, not {inside.value}")
        return value

    @field_validator("inside")
    @classmethod
    def _hybrid_of_what(cls, inside: Inside | None, info: ValidationInfo) -> Inside | None:
        if inside is None and info.data.get("strategy") is Strategy.HYBRID:
            raise ValueError(f"is required: {_names(Inside)}")
        return inside

    @field_validator("devices")
    @classmethod
    def _how_many_devices(cls, devices: int | None, info: ValidationInfo) -> int | None:
        wanted = Strategy.DEVICES is info.data.get("strategy") or Inside.DEVICES is info.data.get("inside")
        if devices is None and wanted:
            raise ValueError("is required: how many devices each rank has")
        return devices

    @field_validator("cuts")
    @classmethod
    def _cut_once(cls, cuts: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(cuts)) != len(cuts):
            raise ValueError("cuts twice at the same layer")
        return cuts

    @field_validator("stages")
    @classmethod
    def _how_many_stages(cls, stages: int | None, info: ValidationInfo) -> int | None:
        strategy, inside, cuts = (info.data.get(name) for name in ("strategy", "inside", "cuts"))
        staged = strategy in (Strategy.MODEL, Strategy.PIPELINE) or inside in (Inside.MODEL, Inside.PIPELINE)
        if cuts and stages not in (None, len(cuts) + 1):
            raise ValueError(f"{len(cuts)} cuts make {len(cuts) + 1} stages, not {stages}")
        if staged and not cuts and stages is None:
            raise ValueError("is required unless there are cuts")
        if staged and stages == 1:
            raise ValueError("one stage is the whole network: use strategy allreduce")
        return stages

    @field_validator("world_size")
    @classmethod
    def _fits_the_layout(cls, world_size: int, info: ValidationInfo) -> int:
        strategy, across = info.data.get("strategy"), info.data.get("across")
        stages = len(info.data.get("cuts", ())) + 1 if info.data.get("cuts") else info.data.get("stages") or 1
        if across is Across.PROCESSES:
            if world_size % stages or (strategy is Strategy.PIPELINE and world_size != stages):
                more = "; for more, use strategy hybrid with inside pipeline" if strategy is Strategy.PIPELINE else ""
                raise ValueError(f"{world_size} ranks cannot hold {stages} stages, one a rank{more}")
        elif strategy in (Strategy.DEVICES, Strategy.MODEL, Strategy.PIPELINE) and world_size != 1:
            raise ValueError(f"{strategy.value} is one process; for more, use hybrid with inside {strategy.value}")
        return world_size

    @field_validator("kvstore")
    @classmethod
    def _async_on_purpose(cls, kvstore: KVStore, info: ValidationInfo) -> KVStore:
        if kvstore is KVStore.DIST_ASYNC and Lossy.DIST_ASYNC not in info.data.get("lossy", ()):
            raise ValueError("dist_async trains another model than one process does; add dist_async to lossy")
        return kvstore

    @field_validator("compression")
    @classmethod
    def _compress_on_purpose(cls, compression: Compression, info: ValidationInfo) -> Compression:
        strategy = info.data.get("strategy")
        if compression is Compression.NONE or strategy is None:
            return compression
        if strategy not in _COMPRESSES[compression]:
            raise ValueError(f"{compression.value} goes with strategy {_names(_COMPRESSES[compression])}")
        if Lossy.COMPRESSION not in info.data.get("lossy", ()):
            raise ValueError(f"{compression.value} rounds gradients; add compression to lossy")
        if compression is Compression.TWO_BIT and info.data.get("kvstore") is KVStore.DIST_ASYNC:
            raise ValueError("2bit goes with kvstore dist_sync or dist_device_sync, not dist_async")
        return compression

    @field_validator("batch_norm")
    @classmethod
    def _local_on_purpose(cls, batch_norm: BatchNorm | None, info: ValidationInfo) -> BatchNorm | None:
        if batch_norm is BatchNorm.LOCAL and Lossy.BATCH_NORM not in info.data.get("lossy", ()):
            raise ValueError("local statistics train another model than one process does; add batch_norm to lossy")
        split = info.data.get("micro_batches", 1) > 1 or info.data.get("accumulate", 1) > 1
        if batch_norm is BatchNorm.SYNCHRONISED and split:
            raise ValueError("statistics of a batch that is computed in parts cannot be synchronised; use frozen")
        if batch_norm is BatchNorm.SYNCHRONISED and info.data.get("kvstore") is KVStore.DIST_ASYNC:
            raise ValueError("workers of dist_async do not wait for each other's statistics; use frozen")
        return batch_norm


def _names(values: Iterable[StrEnum]) -> str:
    return ", ".join(value.value for value in values)
