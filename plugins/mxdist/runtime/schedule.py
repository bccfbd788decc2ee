"""The learning rate as a pure function of how many optimizer steps were made."""

from __future__ import annotations

import math

from mxdist.spec import Decay, Optimizer


def rate(spec: Optimizer, update: int, total: int) -> float:
    """Return the learning rate of optimizer step ``update``.

    Steps count from 1, over all ranks together: neither ranks, devices nor small batches count apart.

    :param total: optimizer steps of the whole training.
    """
    schedule = spec.schedule
    if update <= schedule.warmup_steps:
        left = 1 - update / schedule.warmup_steps
        return spec.learning_rate * update / schedule.warmup_steps + spec.learning_rate * schedule.warmup_from * left
    after = update - 1 - schedule.warmup_steps
    if schedule.decay is Decay.STEP:
        return spec.learning_rate * schedule.factor ** (after // schedule.step_size)
    if schedule.decay is Decay.COSINE:
        span = max(total - 1 - schedule.warmup_steps, 1)
        wave = (1 + math.cos(math.pi * min(after / span, 1.0))) / 2
        return spec.learning_rate * (schedule.final_fraction + (1 - schedule.final_fraction) * wave)
    return spec.learning_rate
