"""A training goes on in another layout than it began in, and ends as one process that nothing disturbed.

What it ends as is the reference's answer, in plain Gluon; Adam, so that weights rest on all of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from parallel.inprocess import worker_of
from parallel.test_law import BOUND, Law, make_law

from mxdist.runtime import loop
from mxdist.runtime.parallel import Alone
from mxdist.runtime.update import Update
from mxdist.spec import TrainingJob
from mxdist.store import Attempt

DEVICES = {"strategy": "devices", "devices": 2}
MODEL = {"strategy": "model", "cuts": ["features.2"]}
TWO = {"strategy": "pipeline", "stages": 2, "micro_batches": 4, "schedule": "gpipe"}
THREE = {"strategy": "pipeline", "cuts": ["features.2", "features.4"], "micro_batches": 3}
RANKS = {**THREE, "across": "processes", "world_size": 3}
REPLICAS = {**TWO, "strategy": "hybrid", "inside": "pipeline", "across": "processes", "world_size": 4}
EVERY = 4
"""Steps from checkpoint to checkpoint; an epoch has ten, so most are in the middle of one."""


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """77 examples in batches of 8: the last one of an epoch has five rows."""
    return make_law(tmp_path_factory.mktemp("resume") / "adam", "adam", 77)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a trainer of this process wait for each checkpoint, so that none is skipped."""
    save = loop.Trainer._save

    def save_and_wait(self: loop.Trainer) -> None:
        save(self)
        assert self._saver is None or self._saver.drain(120)

    monkeypatch.setattr(loop.Trainer, "_save", save_and_wait)


def claim(law: Law, key: str, parallelism: dict[str, Any], after: Attempt | None = None) -> Attempt:
    """Claim a training in a layout, or an attempt that goes on with one."""
    fields = {"parallelism": parallelism, "checkpoints": {"every_steps": EVERY, "keep": 100}}
    job = law._job(parallelism.get("world_size", 1), fields)
    if after is None:
        return law.jobs.claim(job, key)
    return law.jobs.claim(job, key, after=after.number, origin=after.claim.origin)


def here(law: Law, attempt: Attempt) -> None:
    """Train in this process."""
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    loop.Trainer(job, worker_of(law.jobs, attempt), Alone()).run()


def on_ranks(law: Law, attempt: Attempt) -> None:
    """Train on ranks."""
    world = law.jobs.start(attempt, mutation="patient")
    assert set(world.wait()) == {0}, world.logs()


def forget(attempt: Attempt, step: int = EVERY) -> None:
    """Make it as if it had been killed before a checkpoint after ``step`` was published."""
    index = {int(entry.key[-15:-5]): entry.key for entry in attempt.store.list("checkpoints/index/")}
    assert step in index
    attempt.store.delete([key for saved, key in index.items() if saved > step])


def off(law: Law, attempt: Attempt, began: int = EVERY) -> float:
    """Return the largest difference of a weight, or of the loss of a step after ``began``, to the reference."""
    records = [record for record in law.jobs.journal(attempt) if record.key == "loss"]
    assert [record.step for record in records] == list(range(began + 1, 21))
    losses = np.abs(np.array([record.value for record in records]) - law.losses[began:])
    trained = law.jobs.exported(attempt)
    assert trained.keys() == law.weights.keys()
    return max(float(losses.max()), *(float(np.abs(trained[name] - law.weights[name]).max()) for name in trained))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("before", "after"),
    [(DEVICES, THREE), (THREE, DEVICES), (TWO, THREE), (THREE, MODEL), (MODEL, {"accumulate": 3})],
    ids=["devices-pipeline", "pipeline-devices", "two-three", "three-two", "model-accumulate"],
)
def test_another_layout_of_one_process(
    law: Law, before: dict[str, Any], after: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    key = request.node.callspec.id
    first = claim(law, key, before)
    here(law, first)
    forget(first)
    second = claim(law, key, after, first)
    here(law, second)
    assert off(law, second) < BOUND


def lose_counts(patch: pytest.MonkeyPatch) -> None:
    """Count Adam's steps from zero again."""
    patch.setattr(Update, "set_counts", lambda self, counts: None)


def lose_averages(patch: pytest.MonkeyPatch) -> None:
    """Begin with fresh averages of the gradients."""
    adopt = loop.Trainer._adopt

    def forgetful(self: loop.Trainer, *given: Any) -> None:
        adopt(self, *given)
        for array in self.setup.update.state_arrays().values():
            array[:] = 0

    patch.setattr(loop.Trainer, "_adopt", forgetful)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("lose", [lose_counts, lose_averages])
def test_lost_state_of_the_optimizer_breaks_the_law(
    law: Law, lose: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = lose.__name__.replace("_", "-")
    first = claim(law, key, DEVICES)
    here(law, first)
    forget(first)
    second = claim(law, key, TWO, first)
    lose(monkeypatch)
    here(law, second)
    assert off(law, second) > 1000 * BOUND


@pytest.mark.layouts
@pytest.mark.usefixtures("patient")
def test_replicas_of_stages_and_others_of_their_number(law: Law) -> None:
    """Two devices become two replicas of two stages; these go on as such, and then as three stages, each a rank."""
    last = claim(law, "ranks", DEVICES)
    here(law, last)
    for turn, layout in enumerate((REPLICAS, REPLICAS, RANKS), 1):
        forget(last, turn * EVERY)
        last = claim(law, "ranks", layout, last)
        on_ranks(law, last)
        assert off(law, last, turn * EVERY) < BOUND
