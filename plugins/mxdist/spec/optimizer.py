"""How weights are updated. The optimizer is always built from this, never handed on as an object."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, field_validator

from mxdist.spec.base import Spec


class OptimizerName(StrEnum):
    """Optimizers whose state mxdist can checkpoint and resume."""

    SGD = "sgd"
    ADAM = "adam"


class Decay(StrEnum):
    """How the learning rate falls after the warm-up."""

    CONSTANT = "constant"
    STEP = "step"
    COSINE = "cosine"


class Schedule(Spec):
    """The learning rate over optimizer steps: linear warm-up, then a decay."""

    decay: Decay = Field(Decay.CONSTANT, description="constant, step or cosine.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    warmup_from: float = Field(0.0, ge=0, le=1, description="The share of the rate that the warm-up rises from.")
    step_size: int = Field(1000, ge=1, description="step: optimizer steps between two cuts.")
    factor: float = Field(0.1, gt=0, le=1, description="step: what each cut multiplies the rate by.")
    final_fraction: float = Field(0.0, ge=0, le=1, description="cosine: the last rate, as a share of the first.")


_LEAST, _LARGEST = 1e-37, 1e37
"""MXNet computes with float32 numbers, whatever a network's precision is: others become 0 or infinite."""


class Optimizer(Spec):
    """Optimizer, rate, and what is done to the mean gradient of the global batch before it is used."""

    name: OptimizerName = Field(OptimizerName.SGD, description="sgd or adam.")
    learning_rate: float = Field(0.05, gt=0, description="The rate after warm-up, for the global batch.")
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd only.")
    beta1: float = Field(0.9, ge=0, lt=1, description="adam only.")
    beta2: float = Field(0.999, ge=0, lt=1, description="adam only.")
    epsilon: float = Field(1e-8, gt=0, description="adam only.")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty, as MXNet's wd.")
    clip_norm: float | None = Field(None, gt=0, description="Largest global norm of the mean gradient.")
    schedule: Schedule = Schedule()

    @field_validator("learning_rate", "epsilon", "weight_decay", "clip_norm")
    @classmethod
    def _in_float32(cls, value: float | None) -> float | None:
        if value and not _LEAST <= value <= _LARGEST:
            raise ValueError(f"{value:g} is out of range: MXNet takes {_LEAST:g} to {_LARGEST:g}")
        return value
