"""One stage at work on the micro-batches of a step, in the order of its schedule, and what it measured meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
from mxnet import autograd

from mxdist.runtime.batches import Batch
from mxdist.runtime.parallel.layout import divide
from mxdist.runtime.parallel.links import Link
from mxdist.runtime.parallel.orders import Action, order
from mxdist.runtime.parallel.stages import Stage
from mxdist.spec.parallelism import PipelineSchedule

Weight = Callable[[int, mx.Context], mx.nd.NDArray]


@dataclass
class Timeline:
    """When a stage was at work.

    :param spans: the last step's actions with begin and end, in seconds of this machine's monotonic clock.
    :param busy: seconds at work, since ``reset``.
    :param whole: seconds between the begin and the end of steps, since then.
    :param peak: most micro-batches whose activations were held at once, since then.
    """

    spans: list[tuple[Action, float, float]] = field(default_factory=list)
    busy: float = 0.0
    whole: float = 0.0
    peak: int = 0

    def add(self, action: Action, began: float) -> None:
        """Note an action that ends now."""
        ended = time.monotonic()
        self.spans.append((action, began, ended))
        self.busy += ended - began

    def reset(self) -> None:
        """Begin anew."""
        self.busy = self.whole = 0.0
        self.peak = 0


class Runner:
    """Works through the micro-batches of a step.

    It waits for the device after each action: otherwise MXNet would run forward passes as soon as their inputs are
    there, whatever the schedule, and hold their activations.

    :param weight: derivative of the mean loss with respect to the sum of some rows' losses, by rows and device.
    """

    def __init__(self, stage: Stage, link: Link, schedule: PipelineSchedule, parts: int, weight: Weight) -> None:
        self.stage, self.timeline = stage, Timeline()
        self._link, self._schedule, self._parts, self._weight = link, schedule, parts, weight
        self._gradients = [parameter.grad() for parameter in stage.trained.values()]
        if self._gradients:
            autograd.mark_variables([p.data() for p in stage.trained.values()], self._gradients, "add")
        self._live: dict[int, tuple[mx.nd.NDArray, mx.nd.NDArray]] = {}

    def run(self, batch: Batch) -> mx.nd.NDArray:
        """Add this stage's part of the gradient; return the sum of the loss, which is 0 on all but the last stage."""
        began = time.monotonic()
        self.timeline.spans = []
        parts = divide(batch.rows, self._parts)
        stage = self.stage
        todo = order(self._schedule, stage=stage.index, stages=stage.count, parts=len(parts))
        todo = [action for action in todo if action.forward or stage.goes_back]
        waiting = iter([action for action in todo if self._needs(action)])
        self._expect(waiting, parts)
        losses = []
        for action in todo:
            message = self._link.receive() if self._needs(action) else None
            if message is not None:
                message.wait_to_read()
                self._expect(waiting, parts)
            if action.forward:
                losses.append(self._forward(action, batch, parts[action.part], message))
            else:
                self._backward(action, batch, message)
        self.timeline.whole += time.monotonic() - began
        return mx.nd.add_n(*losses) if stage.last else mx.nd.zeros_like(self._weight(batch.total, stage.device))

    def _needs(self, action: Action) -> bool:
        return not (self.stage.first if action.forward else self.stage.last)

    def _expect(self, waiting: Iterator[Action], parts: list[slice]) -> None:
        action = next(waiting, None)
        if action is not None:
            rows = parts[action.part]
            self._link.expect(action, rows.stop - rows.start)

    def _forward(self, action: Action, batch: Batch, rows: slice, message: mx.nd.NDArray | None) -> mx.nd.NDArray:
        began, stage = time.monotonic(), self.stage
        x = _part(batch.x, rows, stage.device) if message is None else message
        targets = (_part(batch.y, rows, stage.device),) if stage.last else ()
        stored = (_part(batch.x, rows, stage.device),) if stage.wants_inputs else ()
        if stage.passes_on:
            x.attach_grad()
        with autograd.record():
            output = stage.training(x, *targets, *stored)
        if stage.goes_back:
            self._live[action.part] = (x, output)
            self.timeline.peak = max(self.timeline.peak, len(self._live))
        output = output.detach()
        output.wait_to_read()
        self.timeline.add(action, began)
        if not stage.last:
            self._link.send(action, output)
        return output

    def _backward(self, action: Action, batch: Batch, message: mx.nd.NDArray | None) -> None:
        began, stage = time.monotonic(), self.stage
        x, output = self._live.pop(action.part)
        head = self._weight(batch.total, stage.device) if message is None else message
        # What has no gradient, like frozen weights, is one node in the graphs of all micro-batches, and MXNet would
        # clear it with the first; the graph goes when ``output`` does.
        output.backward(head, retain_graph=True)
        for gradient in self._gradients:
            gradient.wait_to_read()
        if stage.passes_on:
            x.grad.wait_to_read()
        self.timeline.add(action, began)
        if stage.passes_on:
            self._link.send(action, x.grad)


def _part(array: Any, rows: slice, device: mx.Context) -> mx.nd.NDArray:
    return array[rows].as_in_context(device)
