"""One rank's loop: what it records, when it saves, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from parallel.inprocess import trainer_of, worker_of
from parallel.worlds import Jobs, images, jobs

from mxdist.errors import CheckpointError, DataError, NonFiniteError
from mxdist.runtime.checkpoint import Checkpoints
from mxdist.store import JobRun, open_store


@pytest.fixture
def small(tmp_path: Path) -> Jobs:
    """20 examples, so three steps of eight an epoch."""
    return jobs(tmp_path, {"train": images(20), "validation": images(9, seed=1)})


def attempt_of(small: Jobs, key: str) -> Any:
    """Return the first attempt of a job."""
    return JobRun(open_store(str(small.root / "runs")), key).attempt(1)


def steps_saved(small: Jobs, key: str) -> list[int]:
    """Return the steps of the published checkpoints."""
    return Checkpoints._steps(attempt_of(small, key))


def test_every_step_and_epoch_is_recorded(small: Jobs) -> None:
    trainer = trainer_of(small, "one", epochs=2)
    result = trainer.run().result
    records = small.journal(attempt_of(small, "one"))
    losses = [(record.step, record.epoch) for record in records if record.key == "loss"]
    assert losses == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    epochs = {(record.key, record.epoch): record.value for record in records if record.key.startswith(("train", "val"))}
    keys = ("train_loss", "validation_loss", "validation_accuracy")
    assert epochs.keys() == {(key, epoch) for key in keys for epoch in (1, 2)}
    values = {record.step: record.value for record in records if record.key == "loss"}
    assert epochs["train_loss", 1] == pytest.approx((8 * values[1] + 8 * values[2] + 4 * values[3]) / 20)
    assert result["metrics"] == {key: epochs[key, 2] for key in keys} | {"loss": values[6]}
    assert result["samples_per_s"] > 0
    assert result["outputs"]["labels"] == (0, 1, 2)


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ({"keep": 9}, [3, 6, 9]),
        ({"keep": 2}, [6, 9]),
        ({"every_epochs": 2, "keep": 9}, [6, 9]),
        ({"every_epochs": None, "keep": 9}, [9]),
        ({"every_epochs": None, "every_steps": 2, "keep": 9}, [2, 4, 6, 8, 9]),
    ],
)
def test_when_it_saves(small: Jobs, checkpoints: dict[str, Any], expected: list[int]) -> None:
    trainer = trainer_of(small, "one", epochs=3, checkpoints=checkpoints)
    saver = trainer._saver
    assert saver is not None
    save = saver.save

    def save_and_wait(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        assert saver.drain(60)

    saver.save = save_and_wait  # type: ignore[method-assign]  # a slow store may skip one: here each counts
    trainer.run()
    assert steps_saved(small, "one") == expected


def test_weights_that_are_not_finite_are_not_saved(small: Jobs) -> None:
    trainer = trainer_of(small, "one")
    trainer._begin()
    trainer.setup.update.weights[0][0] = float("inf")
    with pytest.raises(NonFiniteError, match="features.0.weight is not finite after step 0"):
        trainer._save()
    assert steps_saved(small, "one") == []


def test_checkpoint_of_another_network_is_refused(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_of(small, "one").run()
    attempt = small.claim(small.job(), "one", after=1, origin=1)
    saved = Checkpoints(attempt).newest()
    assert saved is not None
    trainer = trainer_of(small, "other", model={"name": "mlp", "params": {"hidden": 5}})
    monkeypatch.setattr(trainer._checkpoints, "newest", lambda: saved)
    with pytest.raises(CheckpointError, match="does not fit this network: param/features.0.bias"):
        trainer.run()


def test_a_changed_rate_wins_over_what_was_saved(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_of(small, "one", epochs=1, optimizer={"learning_rate": 0.01}).run()
    saved = Checkpoints(attempt_of(small, "one")).newest()
    trainer = trainer_of(small, "two", epochs=2, optimizer={"learning_rate": 0.5})
    monkeypatch.setattr(trainer._checkpoints, "newest", lambda: saved)
    trainer.run()
    rates = {
        record.step: record.value for record in small.journal(attempt_of(small, "two")) if record.key == "learning_rate"
    }
    assert set(rates.values()) == {0.5}
    assert min(rates) > 3


def test_without_validation_there_are_no_validation_metrics(tmp_path: Path) -> None:
    result = trainer_of(jobs(tmp_path, {"train": images(9)}), "one").run().result
    assert result["metrics"].keys() == {"loss", "train_loss"}


def test_without_a_train_split_nothing_is_trained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no train split"):
        trainer_of(jobs(tmp_path, {"test": images(9)}), "one")


def test_gradients_of_one_step_are_those_of_plain_gluon_in_float32(small: Jobs) -> None:
    trainer = trainer_of(small, "one", dtype="float32", shuffle=False)
    trainer._begin()
    x, y = images(20)
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu"), nn.Dense(16, activation="relu"), nn.Dense(3))
    net.initialize()
    data = mx.nd.array(x[:8], dtype="float32") / 255
    net(data)
    weights = [weight.asnumpy() for weight in trainer.setup.update.weights]
    for parameter, weight in zip(net.collect_params().values(), weights, strict=True):
        parameter.set_data(mx.nd.array(weight))
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(data), mx.nd.array(y[:8])).mean()
    loss.backward()
    batch = next(iter(trainer._feed.batches(np.arange(20))))
    trainer._step.make(batch, 1)
    for ours, parameter in zip(trainer.setup.update.gradients, net.collect_params().values(), strict=True):
        assert ours.asnumpy() == pytest.approx(parameter.grad().asnumpy(), abs=1e-6)


def test_training_does_not_wait_for_each_step(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values leave the device at exchanges alone, and exchanges are few."""
    trainer = trainer_of(small, "one", epochs=100, checkpoints={"every_epochs": 100})
    reads = []
    meet = trainer._exchange.meet
    monkeypatch.setattr(trainer._exchange, "meet", lambda *, stop: reads.append(1) or meet(stop=stop))
    assert trainer.run().result["steps"] == 300
    assert len(reads) <= 100 + 20  # the end of every epoch, and a few while stretches grow


def test_should_stop_is_asked_at_exchanges(small: Jobs) -> None:
    trainer = trainer_of(small, "one", epochs=50)
    folder = worker_of(small, attempt_of(small, "one")).world_dir
    assert folder is not None
    (folder / "control.json").write_text('{"stop": true}')
    outcome = trainer.run()
    assert outcome.stopped
    assert steps_saved(small, "one") == [outcome.result["steps"]]
    assert outcome.result["steps"] < 150
