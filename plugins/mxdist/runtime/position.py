"""Where a training is: what a checkpoint says beside the arrays, and what a resumed training goes on from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self


@dataclass
class Position:
    """The state of the loop.

    :param step: optimizer steps made.
    :param epoch: epochs finished.
    :param offset: examples of the running epoch that were seen, over all ranks: a position in its permutation.
    :param loss_sum: of these examples.
    :param examples: seen over the whole training, by this and earlier worlds.
    :param seconds: spent on steps, by this and earlier worlds.
    :param metrics: the last value of each, for people and for the result.
    :param parent: digest of the model that the training started from.
    :param started: what was loaded from that model.
    """

    step: int = 0
    epoch: int = 0
    offset: int = 0
    loss_sum: float = 0.0
    examples: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    parent: str | None = None
    started: dict[str, Any] | None = None

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        """Return the position that a checkpoint holds; unknown keys are dropped."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})

    def dump(self) -> dict[str, Any]:
        """Return plain JSON values; a metric that is not finite has none."""
        return {**asdict(self), "metrics": {name: v for name, v in self.metrics.items() if math.isfinite(v)}}

    @property
    def samples_per_s(self) -> float | None:
        """Examples a second over the whole training."""
        return self.examples / self.seconds if self.seconds > 0 else None
