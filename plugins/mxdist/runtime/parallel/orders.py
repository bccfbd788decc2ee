"""In which order a stage works on its micro-batches.

GPipe (Huang et al., 2019): all forward passes, then all backward passes; a stage holds the activations of all ``m``
micro-batches. 1F1B (Narayanan et al., "PipeDream", 2019, in its synchronous form): a stage runs ahead by as many
forward passes as there are stages after it, then makes one forward and one backward pass in turn; it holds the
activations of ``min(m, stages - stage)``. Both do the same work, so both have the same gradient; both are idle for
``s - 1`` of ``m + s - 1`` turns at the least.
"""

from __future__ import annotations

from typing import NamedTuple

from mxdist.spec.parallelism import PipelineSchedule


class Action(NamedTuple):
    """One pass of one micro-batch through a stage.

    :param part: which micro-batch, from 0.
    """

    forward: bool
    part: int


def order(schedule: PipelineSchedule, *, stage: int, stages: int, parts: int) -> list[Action]:
    """Return what stage ``stage`` (from 0) of ``stages`` does in a step of ``parts`` micro-batches."""
    ahead = parts if schedule is PipelineSchedule.GPIPE else min(parts, stages - stage - 1)
    found = [Action(True, part) for part in range(ahead)]
    for part in range(ahead, parts):
        found += [Action(True, part), Action(False, part - ahead)]
    return found + [Action(False, part) for part in range(max(parts - ahead, 0), parts)]
