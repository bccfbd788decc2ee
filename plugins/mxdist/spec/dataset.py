"""Which data a job reads."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from mxdist.spec.base import Spec


class Dataset(Spec):
    """One immutable version of a staged dataset, named by its manifest."""

    manifest_uri: str = Field(min_length=1, description="The manifest, as StageDatasetOperator returns it.")
    version: str = Field(pattern=r"^[0-9a-f]{64}$", description="The version: SHA-256 over its files.")
    labels: tuple[int, ...] | None = Field(
        None, description="Keep only examples with these labels; they become classes 0, 1, ... in this order."
    )

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if labels is not None and (not labels or len(set(labels)) != len(labels)):
            raise ValueError("must be distinct, and at least one")
        return labels


class Split(Spec):
    """How examples are divided into train, validation and test: stratified by label, the same for the same seed."""

    train: float = Field(0.7, gt=0, le=1)
    validation: float = Field(0.15, ge=0, lt=1)
    test: float = Field(0.15, ge=0, lt=1)
    seed: int = Field(0, ge=0)

    @field_validator("test")
    @classmethod
    def _whole(cls, test: float, info: ValidationInfo) -> float:
        if {"train", "validation"} <= info.data.keys():
            total = info.data["train"] + info.data["validation"] + test
            if abs(total - 1) > 1e-9:
                raise ValueError(f"train + validation + test must be 1, not {total:g}")
        return test
