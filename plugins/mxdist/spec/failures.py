"""What a team knows of its own failures: which exit code or which words in a rank's log mean what."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Self

from pydantic import Field, field_validator, model_validator

from mxdist.spec.base import Spec


class Then(StrEnum):
    """What follows a failure."""

    RESTART = "restart"  # the world, from the last checkpoint, while restarts are left
    RETRY = "retry"  # this attempt ends, and whoever asked for the job may ask again
    FAIL = "fail"  # for good: another try would fail in the same way
    AVOID_HOST = "avoid_host"  # as restart, without the host where it happened


class FailurePolicy(Spec):
    """One kind of failure, known by the rank that failed first. Of several policies that fit, the first one counts."""

    exit_code: int | None = Field(None, ge=-64, le=255, description="Its exit code; negative: the signal's number.")
    pattern: str | None = Field(
        None, min_length=1, max_length=500, description="A regular expression found in the end of its log."
    )
    then: Then = Field(description="What follows.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            empty = re.compile(pattern).search("")
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        if empty:
            raise ValueError("fits everything, even an empty log")
        return pattern

    @field_validator("exit_code")
    @classmethod
    def _is_a_failure(cls, exit_code: int | None) -> int | None:
        if exit_code == 0:
            raise ValueError("a rank that ends with 0 has not failed")
        return exit_code

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if self.exit_code is None and self.pattern is None:
            raise ValueError("give an exit_code, a pattern, or both, which must then both fit")
        return self

    def __str__(self) -> str:
        known_by = [f"exit code {self.exit_code}"] if self.exit_code is not None else []
        known_by += [f"{self.pattern!r} in its log"] if self.pattern is not None else []
        return f"{' and '.join(known_by)}: {self.then.value}"
