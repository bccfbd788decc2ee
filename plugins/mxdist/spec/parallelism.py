"""How the work is spread over ranks."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, field_validator

from mxdist.spec.base import Spec


class Strategy(StrEnum):
    """The ways to spread one training over devices and processes."""

    ALLREDUCE = "allreduce"
    PARAMETER_SERVER = "parameter_server"
    DEVICES = "devices"
    MODEL = "model"
    PIPELINE = "pipeline"
    HYBRID = "hybrid"


AVAILABLE = (Strategy.ALLREDUCE,)
"""Strategies that run today; the others are named so that job files can say what they mean."""


class Parallelism(Spec):
    """The world of ranks, in Horovod's words."""

    strategy: Strategy = Field(Strategy.ALLREDUCE, description="How gradients meet.")
    world_size: int = Field(1, ge=1, le=4096, description="Number of ranks over all hosts.")
    fusion_threshold_mb: int = Field(64, ge=0, description="Horovod's fusion buffer, in MiB.")
    cycle_time_ms: float = Field(1.0, gt=0, description="Horovod's cycle time, in milliseconds.")

    @field_validator("strategy")
    @classmethod
    def _available(cls, strategy: Strategy) -> Strategy:
        if strategy not in AVAILABLE:
            raise ValueError(f"{strategy.value!r} is not yet available; use {', '.join(s.value for s in AVAILABLE)}")
        return strategy
