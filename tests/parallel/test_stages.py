"""A network in stages on several devices of one process: the law, where things live, and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from parallel.inprocess import trainer_of, worker_of
from parallel.test_law import BOUND, Law, make_law
from parallel.test_law_models import NORM, SIZE, sequences
from parallel.worlds import Jobs, images, jobs

from mxdist.errors import SpecError
from mxdist.runtime import loop, network, update
from mxdist.runtime.checkpoint import Checkpoints
from mxdist.runtime.parallel import Alone, layout, runner
from mxdist.runtime.parallel.pipeline import DeviceStages
from mxdist.store.sequence import numbered

MODEL = {"strategy": "model", "stages": 2}
ONE_BY_ONE = {"strategy": "pipeline", "cuts": ["features.2", "features.4"], "micro_batches": 3}
GPIPE = {"strategy": "pipeline", "stages": 3, "balance": "time", "micro_batches": 4, "schedule": "gpipe"}
RESNET = """
from mxnet.gluon.model_zoo.vision import BasicBlockV1, ResNetV1

def network(params):
    return ResNetV1(BasicBlockV1, [1, 1], [4, 4, 8], classes=params["classes"], thumbnail=True)
"""


@pytest.fixture(scope="module")
def sgd(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """77 examples in batches of 8: the last one has five rows, so micro-batches of 2, 2 and 1."""
    return make_law(tmp_path_factory.mktemp("stages") / "sgd", "sgd", 77)


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> Law:
    return make_law(tmp_path_factory.mktemp("stages") / "adam", "adam", 77)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Law:
    return make_law(tmp_path_factory.mktemp("stages") / "encoder", "adam", 73, network="encoder", data=sequences(73))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    shape = (1, 16, 16)
    return jobs(
        tmp_path_factory.mktemp("small"),
        {"train": images(73, shape=shape), "validation": images(9, seed=1, shape=shape)},
    )


@pytest.mark.parametrize("parallelism", [MODEL, ONE_BY_ONE, GPIPE], ids=["model", "1f1b", "gpipe"])
def test_stages_give_the_weights_and_losses_of_one_device(sgd: Law, adam: Law, parallelism: dict[str, Any]) -> None:
    assert sgd.here(parallelism=parallelism) < BOUND
    assert adam.here(parallelism=parallelism) < BOUND


def test_fewer_rows_than_micro_batches(tmp_path: Path) -> None:
    law = make_law(tmp_path / "one", "sgd", 73)  # the last batch has one row
    assert law.here(parallelism={**ONE_BY_ONE, "micro_batches": 8, "schedule": "gpipe"}) < BOUND


@pytest.mark.parametrize("balance", ["parameters", "activations"])
def test_an_mlp_cut_by_balance(tmp_path: Path, balance: str) -> None:
    law = make_law(tmp_path / "mlp", "adam", 77, network="mlp")
    mlp = {"name": "mlp", "params": {"hidden": 16}}
    parallelism = {"strategy": "pipeline", "stages": 3, "balance": balance, "micro_batches": 2}
    assert law.here(model=mlp, parallelism=parallelism) < BOUND


def test_frozen_batch_norm(tmp_path: Path) -> None:
    law = make_law(tmp_path / "frozen", "sgd", 77, network="lenet_frozen")
    parallelism = {**ONE_BY_ONE, "batch_norm": "frozen"}
    assert law.here(model=NORM, parallelism=parallelism) < BOUND


def test_batch_norm_of_a_model_in_stages_sees_the_whole_batch(tmp_path: Path) -> None:
    law = make_law(tmp_path / "norm", "sgd", 77, network="lenet_norm")
    assert law.here(model=NORM, parallelism=MODEL) < BOUND


def test_batch_norm_of_micro_batches_is_refused(small: Jobs) -> None:
    with pytest.raises(SpecError, match="set batch_norm to frozen"):
        trainer_of(small, "norm", model=NORM, parallelism={"strategy": "pipeline", "stages": 2, "micro_batches": 2})


def test_small_resnet_of_the_zoo_in_stages(tmp_path: Path) -> None:
    law = make_law(tmp_path / "resnet", "adam", 77, network="resnet", shape=(3, 16, 16))
    (tmp_path / "resnet.py").write_text(RESNET)
    parallelism = {"strategy": "model", "cuts": ["features.2.0", "output"]}
    assert law.here(model={"recipe": str(tmp_path / "resnet.py")}, parallelism=parallelism) < BOUND


@pytest.mark.parametrize("parallelism", [MODEL, {**GPIPE, "cuts": ["encoder.layer.1", "classifier"], "stages": None}])
def test_transformer_encoder_in_stages(encoder: Law, parallelism: dict[str, Any]) -> None:
    """What hides padding reaches every stage."""
    model = {"name": "transformer_encoder", "params": {**SIZE, "pad_id": 0}}
    assert encoder.here(model=model, parallelism=parallelism) < BOUND


def test_transformer_decoder_in_stages(tmp_path: Path) -> None:
    """Its output layer has a matrix of its own; what hides later tokens and padding reaches every stage."""
    tokens = np.random.RandomState(5).randint(1, 20, (21, 9)).astype(np.int32)
    tokens[::3, 5:] = 0
    small = jobs(tmp_path, {"train": (tokens, np.zeros(21, dtype=np.int64))})
    fields: dict[str, Any] = {
        "model": {"name": "transformer_decoder", "params": {**SIZE, "pad_id": 0, "tied": False}},
        "optimizer": {"name": "adam", "learning_rate": 0.005, "clip_norm": 1.0},
        "epochs": 3,
    }
    whole = _exported(small, "whole", **fields)
    assert "lm_head.weight" in whole
    for key, staged in (("model", MODEL), ("pipeline", {**ONE_BY_ONE, "cuts": ["h.1", "lm_head"]})):
        parts = _exported(small, key, **fields, parallelism=staged)
        assert parts.keys() == whole.keys()
        assert max(float(np.abs(whole[name] - parts[name]).max()) for name in whole) < BOUND


def stale_activation(patch: pytest.MonkeyPatch) -> None:
    """Let a stage compute with what the stage before sent for the previous micro-batch."""
    forward = runner.Runner._forward

    def earlier(self: Any, action: Any, batch: Any, rows: slice, message: Any) -> Any:
        before = getattr(self, "before", message)
        self.before = message
        usable = message is not None and before.shape == message.shape
        return forward(self, action, batch, rows, before.copy() if usable else message)

    patch.setattr(runner.Runner, "_forward", earlier)


def wrong_weight_of_the_last_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Let every micro-batch count as much as the first, however few rows it has."""
    backward = runner.Runner._backward

    def alike(self: Any, action: Any, batch: Any, message: Any) -> None:
        weight, parts = self._weight, layout.divide(batch.rows, self._parts)
        rows = parts[action.part]
        factor = (parts[0].stop - parts[0].start) / (rows.stop - rows.start)
        self._weight = lambda total, device: weight(total, device) * factor
        backward(self, action, batch, message)
        self._weight = weight

    patch.setattr(runner.Runner, "_backward", alike)


def no_average_over_micro_batches(patch: pytest.MonkeyPatch) -> None:
    """Take the mean of each micro-batch, and add these."""
    weight = layout.Layout.weight
    patch.setattr(layout.Layout, "weight", lambda self, total, device: weight(self, -(-total // 3), device))


def stage_not_updated(patch: pytest.MonkeyPatch) -> None:
    """Leave out the second stage's gradient."""
    run = runner.Runner.run

    def forget(self: Any, batch: Any) -> Any:
        loss = run(self, batch)
        if self.stage.index == 1:
            for gradient in self._gradients:
                gradient[:] = 0
        return loss

    patch.setattr(runner.Runner, "run", forget)


def gradient_not_reset(patch: pytest.MonkeyPatch) -> None:
    """Add each step's gradient to that of the step before."""
    patch.setattr(DeviceStages, "_clear", lambda self: None)


def clip_before_stages_meet(patch: pytest.MonkeyPatch) -> None:
    """Clip each stage's gradient by its own norm, instead of all by the norm of all."""
    run, clip = runner.Runner.run, update.clip

    def clipped(self: Any, batch: Any) -> Any:
        loss = run(self, batch)
        clip(self._gradients, 1.0)
        return loss

    patch.setattr(runner.Runner, "run", clipped)
    patch.setattr(update, "clip", lambda gradients, largest, meet=None: None)


def wrong_weight_of_the_last_batch(patch: pytest.MonkeyPatch) -> None:
    """Divide by the batch size, not by the number of examples that were there."""
    weight = layout.Layout.weight
    patch.setattr(layout.Layout, "weight", lambda self, total, device: weight(self, 8, device))


def micro_batch_repeated(patch: pytest.MonkeyPatch) -> None:
    """Let every micro-batch have the first one's rows."""
    patch.setattr(runner, "divide", lambda rows, parts: [slice(0, rows // parts)] * min(rows, parts))


WHOLE = [
    stale_activation,
    stage_not_updated,
    gradient_not_reset,
    clip_before_stages_meet,
    wrong_weight_of_the_last_batch,
]
MICRO = [wrong_weight_of_the_last_micro_batch, no_average_over_micro_batches, micro_batch_repeated]


@pytest.mark.parametrize(
    ("parallelism", "mutate"),
    [(layout, mutate) for layout in (MODEL, ONE_BY_ONE, GPIPE) for mutate in WHOLE]
    + [(layout, mutate) for layout in (ONE_BY_ONE, GPIPE) for mutate in MICRO],
)
def test_each_seeded_fault_breaks_the_law(
    sgd: Law,
    parallelism: dict[str, Any],
    mutate: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    assert sgd.here(parallelism=parallelism) > 1000 * BOUND


def test_first_weights_are_those_of_one_device_and_live_on_their_stage(small: Jobs) -> None:
    model = {"name": "lenet", "params": {"channels": 4, "hidden": 16}}
    whole = network.arrays(trainer_of(small, "whole", model=model).setup.net)
    cut = trainer_of(small, "cut", model=model, parallelism=GPIPE)
    parts = network.arrays(cut.setup.net)
    assert list(whole) == list(parts)
    assert all((whole[name].asnumpy() == parts[name].asnumpy()).all() for name in whole)
    assert cut.setup.stages is not None
    for stage in cut.setup.stages.stages:
        places = {array.context for name, array in parts.items() if name in stage.parameters}
        assert places <= {mx.cpu(stage.index)}
    assert {array.context for array in parts.values()} > {mx.cpu(0)}
    update = cut.setup.update
    contexts = [gradient.context for gradient in update.gradients]
    assert contexts == [weight.context for weight in update.weights]
    states = {name.rpartition("/")[0]: array.context for name, array in update.state_arrays().items()}
    assert all(context == parts[name].context for name, context in states.items())


def test_the_bubble_is_the_idle_share() -> None:
    line = runner.Timeline(busy=3.0, whole=4.0, peak=2)
    other = runner.Timeline(busy=1.0, whole=4.0, peak=1)
    from mxdist.runtime.parallel.pipeline import _figures

    found = _figures(Alone(), {0: line, 1: other}, 2)
    expected = {"pipeline_bubble": 0.5, "pipeline_peak_activations_0": 2.0, "pipeline_peak_activations_1": 1.0}
    assert found == expected
    assert (line.busy, line.peak) == (0.0, 0)


def test_a_pipeline_resumes_and_validates_as_one_device_does(small: Jobs) -> None:
    fields: dict[str, Any] = {"checkpoints": {"every_steps": 5, "keep": 100}, "optimizer": {"name": "adam"}}
    first = small.claim(small.job(**fields, parallelism={**GPIPE, "balance": "parameters"}), "resume")
    here = loop.Trainer(first.claim.parsed(), worker_of(small, first), Alone())
    save = here._save

    def save_and_wait() -> None:
        save()
        assert here._saver is None or here._saver.drain(120)

    here._save = save_and_wait  # type: ignore[method-assign]
    here.run()
    trained = small.exported(first)
    scores = {record.key: record.value for record in small.journal(first) if record.key.startswith("validation")}
    for step in (20,):
        first.store.delete([numbered("checkpoints/index", step)])
    assert Checkpoints(first).newest().step == 15  # type: ignore[union-attr]
    second = small.claim(small.job(**fields), "resume", after=first.number, origin=first.claim.origin)
    loop.Trainer(second.claim.parsed(), worker_of(small, second), Alone()).run()
    again = small.exported(second)
    assert max(float(np.abs(trained[name] - again[name]).max()) for name in trained) < 1e-12
    later = {record.key: record.value for record in small.journal(second) if record.key.startswith("validation")}
    assert scores.keys() == later.keys() >= {"validation_loss", "validation_accuracy"}
    assert all(abs(scores[name] - later[name]) < 1e-12 for name in scores)


def test_what_goes_wrong_in_one_stage_is_what_is_raised(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(small, "broken", parallelism={"strategy": "pipeline", "stages": 3, "micro_batches": 2})
    forward = runner.Runner._forward

    def fail(self: Any, *arguments: Any) -> Any:
        if self.stage.index == 1:
            raise ZeroDivisionError("in the middle")
        return forward(self, *arguments)

    monkeypatch.setattr(runner.Runner, "_forward", fail)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        trainer.run()


@pytest.mark.parametrize("frozen", [["^features"], ["^features.0"], ["^output", "^features.2"]])
def test_stages_without_anything_to_train(small: Jobs, frozen: list[str], sgd: Law) -> None:
    """No gradient goes where nothing learns; the rest is as on one device."""
    fields = {"epochs": 1, "init": {"model_uri": sgd.model_uri, "freeze": frozen}, "dataset": sgd.jobs.dataset}
    fields |= {"model": {"name": "lenet", "params": {"channels": 4, "hidden": 16}}}
    one, parts = ("-".join([*frozen, how]).replace("^", "") for how in ("one", "parts"))
    whole = _exported(small, one, **fields)
    cut = _exported(small, parts, **fields, parallelism=ONE_BY_ONE)
    assert max(float(np.abs(whole[name] - cut[name]).max()) for name in whole) < BOUND


def _exported(small: Jobs, key: str, **fields: Any) -> dict[str, np.ndarray]:
    attempt = small.claim(small.job(**fields), key)
    loop.Trainer(attempt.claim.parsed(), worker_of(small, attempt), Alone()).run()
    return small.exported(attempt)


def test_cuts_that_the_network_does_not_have(small: Jobs) -> None:
    with pytest.raises(SpecError) as caught:
        trainer_of(small, "cuts", parallelism={"strategy": "model", "cuts": ["output", "features.0", "nowhere"]})
    assert {problem.path for problem in caught.value.problems} == {
        "parallelism.cuts.1",
        "parallelism.cuts.2",
    }
