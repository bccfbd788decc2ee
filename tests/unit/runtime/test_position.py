"""Where a training stands, as a checkpoint keeps it."""

from __future__ import annotations

import json
import math

from mxdist.runtime.position import Position


def test_metrics_that_are_not_finite_do_not_stop_a_checkpoint() -> None:
    at = Position(epoch=2, metrics={"train_loss": 0.5, "validation_loss": math.nan, "validation_x": math.inf})
    kept = json.loads(json.dumps(at.dump(), allow_nan=False))
    assert Position.load(kept) == Position(epoch=2, metrics={"train_loss": 0.5})
