"""The example jobs, typed as their first lines say, on a few hundred digits and images: each learns something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from world.conftest import wait_until

from mxdist import processes
from mxdist.data.sources import mnist5k
from mxdist.store import Attempt, Result
from support.job_examples import FOLDER, commands
from support.terminal import Terminal

pytestmark = pytest.mark.layouts

ALL_DIGITS = ["hybrid", "model_parallel", "multi_node", "parameter_server", "pipeline", "pipeline_devices"]
ALL_DIGITS += ["simple_nn", "two_devices"]
OF_TEN, OF_FIVE = 0.1, 0.2
"""Accuracy of a guess."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What ``mxdist stage`` prints of every eighth of the 5,000 MNIST digits, which are sorted by label."""
    folder = tmp_path_factory.mktemp("digits")
    source = folder / "source"
    source.mkdir()
    mnist5k(source)
    for name in ("x.npy", "y.npy"):
        np.save(source / name, np.load(source / name)[::8])
    return Terminal(folder).mxdist("stage", "source", "--name", "digits", "--split", "0.7,0.15,0.15")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal in a folder with the examples; of what is typed there nothing may be left."""
    (tmp_path / "examples").symlink_to(FOLDER)
    terminal = Terminal(tmp_path)
    yield terminal
    for attempt in terminal.attempts():
        wait_until(lambda token=attempt.claim.token: not processes.find(token), "the supervisor's end")


def run(terminal: Terminal, example: str, *more: str, **values: str) -> tuple[Attempt, Result]:
    """Type the example's first ``mxdist run``; return its attempt and result.

    :param more: typed after it.
    :param values: typed in place of words in capitals.
    """
    words = commands(FOLDER / f"{example}.yaml", "run")[0]
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    terminal.mxdist(*words, *more)
    (attempt,) = [one for one in terminal.attempts() if one.claim.job["name"] == example.replace("_", "-")]
    result = attempt.result()
    assert isinstance(result, Result)
    return attempt, result


def epoch_losses(attempt: Attempt) -> list[float]:
    """Return the mean loss of each epoch."""
    records = [record for _, chunk in attempt.journal.read() for record in chunk["records"]]
    return [record["value"] for record in records if record["key"] == "train_loss"]


def check_learns(attempt: Attempt, result: Result, guess: float) -> None:
    """The loss falls from the first epoch to the last, and unseen examples are told apart better than by a guess."""
    losses = epoch_losses(attempt)
    assert losses[-1] < losses[0]
    assert result.metrics["validation_accuracy"] > 2 * guess


@pytest.mark.parametrize("example", ALL_DIGITS)
def test_example_learns_the_digits(terminal: Terminal, digits: str, example: str) -> None:
    (terminal.folder / "mnist.yaml").write_text(digits)
    check_learns(*run(terminal, example), OF_TEN)


def test_an_example_that_learns_nothing_would_be_noticed(terminal: Terminal, digits: str) -> None:
    (terminal.folder / "mnist.yaml").write_text(digits)
    attempt, result = run(terminal, "simple_nn", "--set", "optimizer.learning_rate=1e-12", "--set", "epochs=2")
    with pytest.raises(AssertionError):
        check_learns(attempt, result, OF_TEN)


def test_zoo_network_learns_and_is_fine_tuned(terminal: Terminal, digits: str) -> None:
    (terminal.folder / "mnist.yaml").write_text(digits)
    longer = ("--set", "epochs=12")  # 7 steps each: enough for the statistics of BatchNorm to settle
    _, first = run(terminal, "zoo_pretrain", *longer)
    assert first.model_uri is not None
    attempt, second = run(terminal, "zoo_fine_tune", *longer, URI=first.model_uri)

    check_learns(attempt, second, OF_FIVE)
    assert second.metrics["train_loss"] < np.log(5), "a guess among five"


def write_cifar(folder: Path, rows: int) -> None:
    """Write images in CIFAR-10's binary format: a label, then red, green and blue; a class is a pattern and noise."""
    folder.mkdir()
    numbers = np.random.default_rng(0)
    patterns = numbers.integers(0, 200, (10, 3 * 32 * 32))
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        labels = np.arange(rows) % 10
        pixels = patterns[labels] + numbers.integers(0, 56, (rows, 3 * 32 * 32))
        np.column_stack([labels, pixels]).astype(np.uint8).tofile(folder / name)


def test_horovod_learns_cifar(terminal: Terminal) -> None:
    write_cifar(terminal.folder / "cifar-10-batches-bin", rows=320)
    from_folder, _ = commands(FOLDER / "horovod_cifar.yaml", "stage")
    assert from_folder[-2:] == [">", "cifar.yaml"]
    (terminal.folder / "cifar.yaml").write_text(terminal.mxdist(*from_folder[:-2]))

    attempt, result = run(terminal, "horovod_cifar")
    assert result.steps == 9, "a tenth of the 640 rows is the validation split; 576 rows, 64 a step"
    assert result.metrics["validation_accuracy"] > 2 * OF_TEN
    assert epoch_losses(attempt)[0] < np.log(10), "a guess among ten"
