"""Show a DAG run while it goes on: redrawn in a terminal, as plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from follow.progress import Snapshot, Stage
from mxdist.store import State
from steps import duration_text

_FULLEST_FIRST: tuple[tuple[int, dict[str, Any]], ...] = (
    (20, {}),
    (20, {"metrics": 1}),
    (8, {"metrics": 1}),
    (0, {"metrics": 1}),
    (0, {"metrics": 1, "step": False}),
)
"""Columns of the bar, and what of a job is shown beside it."""

_MARKS = {"success": "+", "failed": "x", "upstream_failed": "x", "running": ">", "deferred": ">", "up_for_retry": "~"}
_WORDS = {"success": "done", "upstream_failed": "not started", "up_for_retry": "failed, will be tried again"}


def metrics_text(metrics: Mapping[str, float], limit: int = 3) -> str:
    """Return the metrics that tell most: losses, then accuracies, then others."""

    def rank(name: str) -> tuple[int, str]:
        return (0 if name == "loss" else 1 if "accuracy" in name else 2 if "loss" in name else 3), name

    chosen = sorted(metrics, key=rank)[:limit]
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in chosen)


def job_text(job: State, *, metrics: int = 3, step: bool = True) -> str:
    """Return how far a job is.

    :param metrics: at most so many of them.
    :param step: also the step.
    """
    parts = []
    if job.epochs:
        parts.append(f"epoch {max(1, job.epoch)}/{job.epochs}")  # 1 is the first; 0 means that none has begun
    if job.steps and step:
        parts.append(f"step {job.step}/{job.steps}")
    parts.append(metrics_text(job.metrics, metrics))
    if job.samples_per_s:
        parts.append(f"{job.samples_per_s:.0f} samples/s")
    if job.eta_s is not None and job.step < job.steps:
        parts.append(f"ETA {duration_text(job.eta_s)}")
    if job.world > 1:
        parts.append(f"restarted {job.world - 1}x")
    return "  ".join(part for part in parts if part) or job.state.value.lower()


def stage_text(stage: Stage, **less: Any) -> str:
    """Return one stage in words, without its name.

    :param less: see ``job_text``.
    """
    if stage.job is not None:
        return job_text(stage.job, **less)
    if stage.state in {None, "none", "scheduled", "queued"}:
        return "about to end" if stage.seconds else "waits"
    return f"{state_word(stage.state)}{_retry(stage)}"


def state_word(state: str | None) -> str:
    """Return Airflow's word for a task's state as this demo says it."""
    return _WORDS.get(str(state), str(state or "not started"))


def _retry(stage: Stage) -> str:
    return f" at {time.strftime('%H:%M:%S', time.localtime(stage.retry_at))}" if stage.retry_at else ""


def _why(snapshot: Snapshot) -> str:
    if snapshot.state != "queued":
        return ""
    if snapshot.ahead is None:
        return " (one run at a time: an earlier one may go first)"
    stage = snapshot.ahead.stage
    where = f", whose stage {stage.task_id} {_doing(stage)}" if stage else ""
    return f" (one run at a time: it waits for {snapshot.ahead.run_id}{where})"


def _doing(stage: Stage) -> str:
    if stage.state == "up_for_retry":
        return f"failed and waits for its retry{_retry(stage)}"
    return "is at work" if stage.active else "is about to begin"


def _line(stage: Stage, width: int) -> str:
    """Return one stage with all that fits: first the bar and further metrics go, then the step, never the loss."""
    mark = _MARKS.get(str(stage.state), " ")
    took = duration_text(stage.seconds) if stage.seconds else ""
    head = f"  {mark} {stage.task_id:<10} {took:>10}  "
    line = ""
    for bar, less in _FULLEST_FIRST:
        line = head + _bar(stage, bar) + stage_text(stage, **less)
        if len(line) <= width:
            break
    return line


def _bar(stage: Stage, length: int) -> str:
    if stage.job is None or not stage.job.steps or not length:
        return ""
    filled = min(length, length * stage.job.step // stage.job.steps)
    return f"[{'#' * filled}{'.' * (length - filled)}] "


class View(ABC):
    """Shows snapshots."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    @abstractmethod
    def show(self, snapshot: Snapshot) -> None:
        """Show how things stand now."""

    def close(self) -> None:
        """Leave the terminal in order."""
        sys.stdout.flush()


class Terminal(View):
    """One line a stage, redrawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn = 0

    def show(self, snapshot: Snapshot) -> None:
        width = shutil.get_terminal_size().columns - 1
        head = f"  run {snapshot.state}{_why(snapshot)}, {duration_text(time.monotonic() - self.begin)}"
        lines = [head, *(_line(stage, width) for stage in snapshot.stages)]
        up = f"\033[{self._drawn}A" if self._drawn else ""
        sys.stdout.write(up + "".join(f"\r\033[K{line[:width]}\n" for line in lines))
        sys.stdout.flush()
        self._drawn = len(lines)


class Plain(View):
    """A line when something changed, but not more than one every few seconds for each stage."""

    every_s = 5.0

    def __init__(self) -> None:
        super().__init__()
        self._queued = ""
        self._said: dict[str, tuple[str, str | None, float]] = {}

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.state == "queued" and _why(snapshot) != self._queued:
            self._queued = _why(snapshot)
            print(f"  run queued{self._queued}", flush=True)
        for stage in snapshot.stages:
            text, now = stage_text(stage), time.monotonic()
            last_text, last_state, last_at = self._said.get(stage.task_id, ("waits", None, 0.0))
            changed = stage.state != last_state and text != last_text
            if text == last_text or not (changed or now - last_at > self.every_s):
                continue
            self._said[stage.task_id] = (text, stage.state, now)
            took = f" ({duration_text(stage.seconds)})" if stage.state == "success" else ""
            print(f"  [{duration_text(now - self.begin):>12}] {stage.task_id:<10} {text}{took}", flush=True)


def choose() -> View:
    """Return the view that fits standard output."""
    return Terminal() if sys.stdout.isatty() else Plain()
