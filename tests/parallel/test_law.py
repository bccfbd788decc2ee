"""The one law: any number of ranks gives the weights of one process with the global batch.

The reference (``reference.py``) is a plain Gluon loop that knows nothing of mxdist. Everything is float64; 20 steps;
the last batch of each epoch is small, so that one rank has no row, or fewer than the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.inprocess import worker_of
from parallel.worlds import Jobs, images, jobs

from mxdist.runtime import loop
from mxdist.runtime.parallel import Alone
from mxdist.spec import TrainingJob
from mxdist.store import Attempt, open_store

REFERENCE = Path(__file__).with_name("reference.py")
BOUND = 1e-9
SGD = {
    "optimizer": "sgd",
    "arguments": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
    "learning_rate": 0.1,
    "warmup_steps": 5,
    "decay": "cosine",
}
ADAM = {
    "optimizer": "adam",
    "arguments": {"learning_rate": 0.005, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "wd": 1e-3},
    "learning_rate": 0.005,
    "warmup_steps": 3,
    "decay": "step",
    "step_size": 8,
    "factor": 0.5,
}
PLAIN = {**SGD, "warmup_steps": 0, "decay": "constant"}
SHARED = {"shared_memory_mb": 0}
SCALED_ADAM = {**ADAM, "warmup_from": 0.5}
CASES = {"sgd": SGD, "adam": ADAM, "plain": PLAIN, "scaled_adam": SCALED_ADAM}
CLIP_NORM = {"lenet": 1.5, "lenet_norm": 2.5}
"""Of the networks that need another one than 2 for ``check_that_faults_show``."""


@dataclass
class Law:
    """One case: its data, the reference's answer, and jobs that should give the same."""

    jobs: Jobs
    case: dict[str, Any]
    model_uri: str
    weights: dict[str, np.ndarray]
    losses: np.ndarray
    made: int = 0

    def difference(self, *, ranks: int, mutation: str = "", **fields: Any) -> float:
        """Train on ``ranks`` ranks; return the largest difference of a weight or a loss to the reference."""
        self.made += 1
        attempt = self.jobs.claim(self._job(ranks, fields), f"law-{self.made}")
        world = self.jobs.start(attempt, mutation=mutation)
        codes = world.wait()
        assert set(codes) == {0}, f"{codes}\n{world.logs()}"
        return self.off(attempt)

    def here(self, **fields: Any) -> float:
        """Train in this process, on one rank; return the same difference."""
        self.made += 1
        attempt = self.jobs.claim(self._job(1, fields), f"law-{self.made}")
        job = attempt.claim.parsed()
        assert isinstance(job, TrainingJob)
        loop.Trainer(job, worker_of(self.jobs, attempt), Alone()).run()
        return self.off(attempt)

    def off(self, attempt: Attempt) -> float:
        """Return the largest difference of a weight or a loss of a finished attempt to the reference."""
        trained = self.jobs.exported(attempt)
        assert trained.keys() == self.weights.keys()
        losses = [record.value for record in self.jobs.journal(attempt) if record.key == "loss"]
        assert len(losses) == len(self.losses) == 20
        worst = max(float(np.abs(trained[name] - self.weights[name]).max()) for name in trained)
        return max(worst, float(np.abs(np.array(losses) - self.losses).max()))

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer of the case, as a job has it."""
        case, arguments = self.case, self.case["arguments"]
        schedule = {key: case[key] for key in ("decay", "warmup_steps", "step_size", "factor") if key in case}
        given = {key: arguments[key] for key in arguments if key != "wd"}
        fixed = {"name": case["optimizer"], "weight_decay": arguments["wd"], "clip_norm": case["clip_norm"]}
        return {**fixed, "schedule": schedule, **given}

    def _job(self, ranks: int, fields: dict[str, Any]) -> Any:
        document = {
            "model": {"name": "lenet", "params": {"channels": 4, "hidden": 16}},
            "seed": self.case["seed"],
            "batch_size": self.case["batch_size"],
            "epochs": self.case["epochs"],
            "init": {"model_uri": self.model_uri},
            "optimizer": self.optimizer(),
        }
        parallelism = {"world_size": ranks, **fields.pop("parallelism", {})}
        return self.jobs.job(**{**document, "parallelism": parallelism, **fields})


def make_law(
    root: Path,
    optimizer: str,
    rows: int,
    *,
    network: str = "lenet",
    shape: tuple[int, ...] = (1, 16, 16),
    data: tuple[np.ndarray, np.ndarray] | None = None,
) -> Law:
    """Run the reference on ``rows`` examples.

    :param network: one that the reference has.
    :param data: instead of random images of ``shape``.
    """
    root.mkdir()
    x, y = data or images(rows, shape=shape)
    clip_norm = None if optimizer == "plain" else CLIP_NORM.get(network, 2.0)
    case = {"seed": 3, "batch_size": 8, "epochs": 2, "network": network, "clip_norm": clip_norm, **CASES[optimizer]}
    case |= {name: str(root / f"{name}.npz") for name in ("data", "initial", "trained")}
    np.savez(case["data"], x=x, y=y)
    (root / "case.json").write_text(json.dumps(case))
    subprocess.run([sys.executable, "-I", str(REFERENCE), str(root / "case.json")], check=True, timeout=300)
    with np.load(case["trained"]) as trained:
        weights = {name: trained[name] for name in trained.files}
    check_that_faults_show(case, weights.pop("norms"), rows)
    return Law(
        jobs(root, {"train": (x, y)}), case, _publish_initial(root, case["initial"]), weights, weights.pop("losses")
    )


def check_that_faults_show(case: dict[str, Any], norms: np.ndarray, rows: int) -> None:
    """Some steps are clipped and others not, so that neither fault hides behind the other.

    A gradient of the wrong size is the same again once it is clipped. So that of the small last batch must not be when
    it is divided by the batch size.
    """
    if case["clip_norm"] is None:
        return
    clipped = int((norms > case["clip_norm"]).sum())
    assert 3 <= clipped <= 17, norms
    last, small = len(norms) // case["epochs"] - 1, rows % case["batch_size"]
    assert norms[last] * small / case["batch_size"] < case["clip_norm"], norms


def _publish_initial(root: Path, arrays: str) -> str:
    """Publish the reference's initial weights as a model that a job can start from."""
    from mxdist.runtime.finetune import label_digest
    from mxdist.tracking import models

    folder = root / "initial"
    folder.mkdir()
    (folder / "params.npz").write_bytes(Path(arrays).read_bytes())
    (folder / "model.json").write_text(json.dumps({"label_digest": label_digest((0, 1, 2)), "labels": [0, 1, 2]}))
    store = open_store(str(root / "published"))
    models.publish(folder, store)
    return f"{store.uri}/model"


@pytest.fixture(scope="module", params=["sgd", "adam"])
def law(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Law:
    """73 examples: the last batch of an epoch has one row, so one of two ranks has none."""
    return make_law(tmp_path_factory.mktemp("law") / request.param, request.param, 73)


def test_reference_knows_nothing_of_mxdist() -> None:
    code = [line for line in REFERENCE.read_text().splitlines() if line.strip().startswith(("import ", "from "))]
    assert {line.split()[1].partition(".")[0] for line in code} == {
        "__future__",
        "json",
        "math",
        "mxnet",
        "numpy",
        "sys",
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_give_the_weights_and_losses_of_one_process(law: Law, ranks: int) -> None:
    assert law.difference(ranks=ranks) < BOUND


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (4, 1), (2, 2)])
def test_sums_in_shared_memory_hold_the_law(law: Law, ranks: int, accumulate: int) -> None:
    assert law.difference(ranks=ranks, parallelism={**SHARED, "accumulate": accumulate}) < BOUND


def test_shared_memory_is_what_sums(law: Law) -> None:
    assert law.difference(ranks=2, parallelism=SHARED, mutation="no_shared_sum+unchecked") > 1000 * BOUND
    assert law.difference(ranks=2, mutation="no_shared_sum") < BOUND  # so little goes through Horovod by default


def test_uneven_last_batch(tmp_path: Path) -> None:
    assert make_law(tmp_path / "uneven", "sgd", 77).difference(ranks=2) < BOUND  # 5 rows: 2 and 3


def test_scaled_batch_and_rate_are_those_of_one_process(tmp_path: Path) -> None:
    """A job for one rank, with half the batch and rate, on two: the reference has the effective values."""
    law = make_law(tmp_path / "scaled", "sgd", 73)
    scaled = {
        "batch_size": 4,
        "scaling": {"policy": "scale_lr"},
        "optimizer": {**law.optimizer(), "learning_rate": 0.05},
    }
    assert law.difference(ranks=2, **scaled) < BOUND


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        pytest.param(2, {}, id="two ranks"),
        pytest.param(1, {"strategy": "devices", "devices": 2}, id="two devices"),
        pytest.param(4, {"strategy": "hybrid", "inside": "pipeline", "across": "processes", "stages": 2,
                         "micro_batches": 2}, id="two replicas of stages"),
    ],
)  # fmt: skip
def test_scaled_rate_warms_up_from_the_base_rate(tmp_path: Path, ranks: int, parallelism: dict[str, Any]) -> None:
    """Adam on an MLP, for one replica, on two; the cuts of the rate come as late as they did."""
    law = make_law(tmp_path / "scaled", "scaled_adam", 73, network="mlp")
    schedule = {"decay": "step", "step_size": 8, "factor": 0.5}
    scaled = {
        "model": {"name": "mlp", "params": {"hidden": 16}},
        "batch_size": 4,
        "scaling": {"policy": "scale_lr", "warmup_steps": 3},
        "optimizer": {**law.optimizer(), "learning_rate": 0.0025, "schedule": schedule},
        "parallelism": parallelism,
    }
    assert law.difference(ranks=ranks, **scaled) < BOUND
    cold = {**scaled, "scaling": {"policy": "scale_lr"}}
    assert law.difference(ranks=ranks, **cold) > 1000 * BOUND


def test_unbroken_mutant_holds_the_law(law: Law) -> None:
    assert law.difference(ranks=2, mutation="nothing") < BOUND


@pytest.mark.parametrize(
    "mutation",
    ["no_averaging", "clip_before_reduce", "wrong_weight_for_last_batch", "data_repeated", "no_broadcast"],
)
def test_each_seeded_fault_breaks_the_law(law: Law, mutation: str) -> None:
    assert law.difference(ranks=2, mutation=f"{mutation}+unchecked") > 1000 * BOUND


@pytest.mark.parametrize("mutation", ["no_averaging", "no_broadcast", "drift"])
def test_ranks_that_differ_end_loudly(tmp_path: Path, mutation: str) -> None:
    small = jobs(tmp_path, {"train": images(64)})
    attempt = small.claim(small.job(parallelism={"world_size": 2}), "different")
    world = small.start(attempt, mutation=mutation)
    assert world.wait() == [81, 81]
    assert "the parameters of rank 1 differ from those of rank 0" in world.result()["error"]["message"]
    assert not (small.folder(attempt) / "model").exists()


def test_initial_weights_do_not_rest_on_equal_seeds(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(24)})
    fields: dict[str, Any] = {"epochs": 1, "parallelism": {"world_size": 2}}
    equal = small.train("equal", mutation="nothing", **fields)
    different = small.train("different", mutation="seeds_differ", **fields)
    assert all((equal[name] == different[name]).all() for name in equal)
