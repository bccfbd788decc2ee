"""What more or fewer copies of the model than a job was written for do to its batch and its rate."""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction

from pydantic import Field, ValidationInfo, field_validator

from mxdist.spec.base import Spec
from mxdist.spec.optimizer import Optimizer


class ScalingPolicy(StrEnum):
    """Ways to use more copies of the model."""

    KEEP_GLOBAL_BATCH = "keep_global_batch"
    SCALE_LR = "scale_lr"


class Scaling(Spec):
    """How a job file grows with the copies of the model that it gets: see ``Parallelism.copies``.

    ``keep_global_batch``: the same training on any number of them. ``scale_lr``: another training, whose batch and
    rate grow with them (Goyal et al., "Accurate, large minibatch SGD", 2017: linear scaling, and a warm-up that goes
    from the base rate to the scaled one).
    """

    policy: ScalingPolicy = Field(
        ScalingPolicy.KEEP_GLOBAL_BATCH,
        description="keep_global_batch, or scale_lr: batch and rate grow with replicas.",
    )
    base_replicas: int = Field(1, ge=1, description="scale_lr: the replicas that batch_size and rate are meant for.")
    warmup_steps: int = Field(0, ge=0, description="scale_lr: optimizer steps from the base rate to the scaled one.")

    @field_validator("base_replicas", "warmup_steps")
    @classmethod
    def _means_something(cls, value: int, info: ValidationInfo) -> int:
        kept = info.data.get("policy") is ScalingPolicy.KEEP_GLOBAL_BATCH
        if kept and value != cls.model_fields[str(info.field_name)].default:
            raise ValueError("goes with policy scale_lr, not keep_global_batch")
        return value

    def factor(self, copies: int) -> Fraction:
        """Return what batch and rate are multiplied by."""
        if self.policy is ScalingPolicy.KEEP_GLOBAL_BATCH:
            return Fraction(1)
        return Fraction(copies, self.base_replicas)

    def batch_size(self, batch_size: int, copies: int) -> int:
        """Return the global batch that is trained with.

        :raises ValueError: it would not be a whole number of rows.
        """
        scaled = batch_size * self.factor(copies)
        if scaled.denominator != 1:
            raise ValueError(
                f"{batch_size} x {copies} replicas / scaling.base_replicas {self.base_replicas} is no whole number"
            )
        return int(scaled)

    def optimizer(self, optimizer: Optimizer, copies: int) -> Optimizer:
        """Return the optimizer that is trained with; a rate that shrinks needs no warm-up, and gets none."""
        factor = self.factor(copies)
        if factor == 1:
            return optimizer
        schedule = optimizer.schedule
        if self.warmup_steps and factor > 1:
            changed = {"warmup_steps": self.warmup_steps, "warmup_from": float(1 / factor)}
            schedule = schedule.model_copy(update=changed)
        scaled = float(optimizer.learning_rate * factor)
        return optimizer.model_copy(update={"learning_rate": scaled, "schedule": schedule})
