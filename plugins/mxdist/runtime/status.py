"""How an attempt stands, put together for whoever reads the run store."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from mxdist.runtime.finish import Tracker
from mxdist.runtime.place import read_json
from mxdist.runtime.reporter import Reporter
from mxdist.runtime.world import World
from mxdist.spec import JobState
from mxdist.store import State

_RATE_WINDOW_S = 60.0


class Pace:
    """Steps a second over the last minute, and the time that is left."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def add(self, step: int, *, now: float | None = None) -> None:
        """Note that ``step`` optimizer steps are done."""
        if step == 0:  # the first step takes long, and says nothing of those to come
            return
        now = time.monotonic() if now is None else now
        if self._points and step < self._points[-1][1]:  # a restart went back to a checkpoint
            self._points.clear()
        if not self._points or step > self._points[-1][1]:
            self._points.append((now, step))
        while len(self._points) > 2 and now - self._points[0][0] > _RATE_WINDOW_S:
            self._points.pop(0)

    def eta_s(self, steps: int) -> float | None:
        """Return the seconds until ``steps`` are done; None while that cannot be told."""
        if steps <= 0 or len(self._points) < 2:
            return None
        (begin, first), (end, last) = self._points[0], self._points[-1]
        return (steps - last) * (end - begin) / (last - first) if end > begin else None


class Status:
    """The state of one attempt as its supervisor sees it; every change goes to the reporter.

    :param seen: what the last supervisor left in the run store.
    """

    def __init__(self, reporter: Reporter, tracker: Tracker, seen: State) -> None:
        self._reporter, self._tracker = reporter, tracker
        self._pace = Pace()
        self.state = replace(seen, state=JobState.STARTING, message="", ranks=[])
        reporter.show(self.state)

    def note(self, text: str) -> None:
        """Add a line to the job's log, which is the state's message as well."""
        self._reporter.note(text)
        self.state = replace(self.state, message=text)

    def end(self, state: JobState, message: str) -> None:
        """Show how the attempt ended."""
        self.state = replace(self.state, state=state, message=message)
        self._reporter.show(self.state)

    def show(self, world: World, state: JobState) -> None:
        """Show how a world stands, from what its ranks have told."""
        told = read_json(world.folder / "progress.json")
        ranks = [_rank(world, index) for index in range(len(world.ranks))]
        step = int(told.get("step") or max((rank["step"] for rank in ranks), default=0) or self.state.step)
        self._pace.add(step)
        steps = int(told.get("steps") or self.state.steps)
        run_id, run_url = self._tracker.run
        self.state = replace(
            self.state,
            state=state,
            world=world.number,
            epoch=int(told.get("epoch") or self.state.epoch),
            epochs=int(told.get("epochs") or self.state.epochs),
            step=step,
            steps=steps,
            samples_per_s=told.get("samples_per_s") or self.state.samples_per_s,
            eta_s=self._pace.eta_s(steps),
            metrics=told.get("metrics") or self.state.metrics,
            ranks=ranks,
            mlflow_run_id=run_id or self.state.mlflow_run_id,
            mlflow_run_url=run_url or self.state.mlflow_run_url,
        )
        self._reporter.show(self.state)


def _rank(world: World, index: int) -> dict[str, Any]:
    rank = world.ranks[index]
    beat = read_json(world.folder / f"rank-{rank.number}.beat.json")
    return {
        "rank": rank.number,
        "pid": rank.pid,
        "host": rank.host,
        "local_rank": rank.plan.local_rank,
        "step": int(beat.get("step") or 0),
        "exit_code": rank.exit_code,
    }
