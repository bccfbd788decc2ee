"""``verify_layout``: sound layouts pass and change nothing; each seeded fault is refused, by tensor and size."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.inprocess import worker_of
from parallel.worlds import PLUGINS, Jobs, images, jobs, start

from mxdist.errors import TrainingFailed
from mxdist.runtime import exit_codes, judging, loop, verify
from mxdist.runtime.parallel import devices
from mxdist.runtime.parallel.pipeline import DeviceStages
from mxdist.spec import TrainingJob

pytestmark = pytest.mark.layouts

TWO = {"strategy": "devices", "devices": 2}
PIPELINE = {"strategy": "pipeline", "stages": 2, "micro_batches": 3}
STAGES = {**PIPELINE, "across": "processes", "stages": 3, "world_size": 3}
OPTIMIZER = {"learning_rate": 0.1, "weight_decay": 1e-3, "clip_norm": 0.5}
NETWORK = """
from mxnet import gluon
from mxnet.gluon import nn

def network(params):
    net = nn.HybridSequential()
    net.add(nn.Dense(8, activation="relu"), LAYER, nn.Dense(params["classes"]))
    return net
"""
RANDOM = """
class Noise(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return x + F.random.normal_like(x)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """21 examples in batches of 8: the last one has 5 rows."""
    return jobs(tmp_path_factory.mktemp("verify"), {"train": images(21)})


def train(small: Jobs, key: str, **fields: Any) -> dict[str, np.ndarray]:
    """Train in this process; return the weights."""
    attempt = small.claim(small.job(**{"optimizer": OPTIMIZER, "epochs": 1, **fields}), key)
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    loop.train(job, worker_of(small, attempt))
    return small.exported(attempt)


def recipe(folder: Path, layer: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    path = folder / "net.py"
    path.write_text(NETWORK.replace("LAYER", layer) + RANDOM)
    return {"recipe": str(path)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "parallelism",
    [{}, TWO, {"accumulate": 3}, {"strategy": "model", "stages": 2}, PIPELINE],
    ids=["one", "devices", "accumulate", "model", "pipeline"],
)
def test_sound_layouts_pass(small: Jobs, dtype: str, parallelism: dict[str, Any], request: Any) -> None:
    key = re.sub(r"\W+", "-", request.node.callspec.id)
    attempt = small.claim(small.job(dtype=dtype, parallelism=parallelism, verify_layout=True), key)
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    loop.train(job, worker_of(small, attempt))
    records = [record for record in small.journal(attempt) if record.key == "layout_difference"]
    assert [record.step for record in records] == [0]
    assert 0 <= (records[0].value or 0) < judging.EXACT.gradient


@pytest.mark.parametrize("layer", ["nn.Dropout(0.5)", "nn.BatchNorm()"])
def test_what_is_trained_afterwards_is_the_same_bit_for_bit(small: Jobs, tmp_path: Path, layer: str) -> None:
    model = recipe(tmp_path, layer)
    plain, verified = (
        train(small, f"{layer[3:7].lower()}-{flag}", model=model, verify_layout=flag, seed=5) for flag in (False, True)
    )
    assert plain.keys() == verified.keys()
    assert all((plain[name] == verified[name]).all() for name in plain)


def stale(patch: pytest.MonkeyPatch) -> None:
    first = devices.Devices._refresh
    patch.setattr(devices.Devices, "_refresh", lambda self: first(self) if self._squares is None else None)
    patch.setattr(devices.Devices, "gather", lambda self, state=True: None)  # which would tell it sooner


def lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(devices, "divide", lambda rows, parts: [slice(0, rows // 2)])


def wrong_weight(patch: pytest.MonkeyPatch) -> None:
    weight = devices.Devices.weight
    patch.setattr(devices.Devices, "weight", lambda self, total, device: weight(self, 8, device))


def noise(patch: pytest.MonkeyPatch) -> None:
    update = devices.Devices.update

    def add(self: Any, number: int) -> float:
        self.updater.gradients[0] += 1e-5
        return update(self, number)

    patch.setattr(devices.Devices, "update", add)


def doubled(patch: pytest.MonkeyPatch) -> None:
    update = devices.Devices.update

    def twice(self: Any, number: int) -> float:
        for gradient in self.updater.gradients:
            gradient *= 2
        return update(self, number)

    patch.setattr(devices.Devices, "update", twice)


def only_in_float32(patch: pytest.MonkeyPatch) -> None:
    reduce_ = devices.Devices.reduce

    def scrambled(self: Any) -> None:
        reduce_(self)
        first = self.updater.gradients[0]
        if first.dtype == np.float32:
            first[:] = first.reshape(first.shape[::-1]).T.reshape(first.shape)

    patch.setattr(devices.Devices, "reduce", scrambled)


SLOW: tuple[dict[str, Any], ...] = (
    {"learning_rate": 1e-6, "momentum": 0},
    {"learning_rate": 1e-3, "schedule": {"warmup_steps": 100}},
    {"learning_rate": 1e-2, "schedule": {"decay": "cosine", "warmup_steps": 1000}},
)


@pytest.mark.parametrize("optimizer", SLOW)
@pytest.mark.parametrize("broken", [False, True], ids=["sound", "doubled"])
def test_a_low_rate_hides_no_fault(
    small: Jobs, optimizer: dict[str, Any], broken: bool, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    key = re.sub(r"\W+", "-", request.node.name).strip("-").replace("_", "-").lower()[-50:]
    fields = {"optimizer": optimizer, "parallelism": TWO, "verify_layout": True}
    if not broken:
        train(small, key, **fields)
        return
    doubled(monkeypatch)
    with pytest.raises(TrainingFailed, match="the change of the weight at step 1"):
        train(small, key, **fields)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("layer", ["nn.BatchNorm()", "nn.LayerNorm()"])
def test_gradients_that_are_nothing_but_rounding_pass(
    small: Jobs, tmp_path: Path, layer: str, optimizer: str, request: Any
) -> None:
    frozen = {"strategy": "model", "stages": 2} if layer == "nn.BatchNorm()" else TWO
    key = re.sub(r"\W+", "-", request.node.name).strip("-").lower()[-50:]
    rate = {"name": optimizer, "learning_rate": 1e-4}
    train(small, key, model=recipe(tmp_path, layer), optimizer=rate, parallelism=frozen, verify_layout=True)


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        (stale, r"the gradient at step 2 of \S+ differs by up to \S+, \S+ of its largest value, on rank 0"),
        (lost, "the gradient at step 1 of"),
        (wrong_weight, "the gradient at step 2 of"),
        (noise, r"the change of the weight at step 1 of features.0.weight differs by up to"),
        (doubled, r"as one process does in float32: the change of the weight at step 1 of"),
        (only_in_float32, r"as one process does in float32: the gradient at step 1 of features.0.weight differs"),
    ],
)
def test_each_fault_of_devices_is_refused(
    small: Jobs, mutation: Any, words: str, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    mutation(monkeypatch)
    with pytest.raises(TrainingFailed, match=words) as caught:
        train(
            small, request.node.name.replace("[", "-").strip("]"), parallelism=TWO, verify_layout=True, dtype="float32"
        )
    assert not caught.value.retryable


MUTATIONS = {
    "no_averaging": "the gradient at step 1 of",
    "clip_before_reduce": "the gradient at step 1 of",
    "wrong_weight_for_last_batch": "the gradient at step 2 of",
    "data_repeated": "the gradient at step 1 of",
    "no_broadcast": "the gradient at step 1 of",
    "doubled_updates": "the change of the weight at step 1 of",
}


@pytest.fixture(scope="module")
def told(small: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two ranks say about each case."""
    folder = tmp_path_factory.mktemp("told")
    half = {"compression": "fp16", "lossy": ["compression"]}
    networks = {layer: recipe(folder / layer, f"nn.{layer}()") for layer in ("BatchNorm", "LayerNorm")}
    cases: dict[str, Any] = {name: ({}, {}, name) for name in (*MUTATIONS, "nothing")}
    cases["synchronised"] = ({"model": networks["BatchNorm"]}, {"batch_norm": "synchronised"}, "nothing")
    cases["half"] = ({"model": networks["LayerNorm"]}, half, "nothing")
    cases["half_unreduced"] = ({}, half, "no_averaging")
    documents = {
        name: (small.job(optimizer=OPTIMIZER, parallelism={"world_size": 2, **layout}, **fields).to_document(), fault)
        for name, (fields, layout, fault) in cases.items()
    }
    (folder / "cases.json").write_text(json.dumps(documents))
    script = Path(__file__).with_name("verify_checks.py")
    path = f"{PLUGINS}:{script.parents[1]}"
    world = start(folder, [sys.executable, str(script), str(folder / "cases.json")], 2, {"PYTHONPATH": path})
    assert world.wait() == [0, 0], world.logs()
    found: dict[str, str] = json.loads((folder / "told.json").read_text())
    return found


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_each_fault_between_ranks_is_refused(told: dict[str, str], mutation: str) -> None:
    assert "the planned layout does not train as one process does" in told[mutation]
    assert MUTATIONS[mutation] in told[mutation]


def test_float16_is_judged_by_its_bound(told: dict[str, str]) -> None:
    assert told["half"] == ""
    assert "which float16 may change by" in told["half_unreduced"]


@pytest.mark.parametrize("sound", ["nothing", "synchronised"])
def test_sound_ranks_pass(told: dict[str, str], sound: str) -> None:
    assert told[sound] == ""


def test_a_refused_layout_trains_nothing(small: Jobs) -> None:
    fields = {"optimizer": OPTIMIZER, "parallelism": {"world_size": 2}, "verify_layout": True}
    attempt = small.claim(small.job(**fields), "refused")
    world = small.start(attempt, mutation="no_averaging+unchecked")
    assert world.wait() == [exit_codes.USER_ERROR] * 2, world.logs()
    assert "does not train as one process does" in world.result()["error"]["message"]
    assert not small.journal(attempt)


def test_stages_across_ranks_pass(small: Jobs) -> None:
    fields = {"optimizer": OPTIMIZER, "parallelism": STAGES, "verify_layout": True, "epochs": 1}
    attempt = small.claim(small.job(**fields), "stages")
    world = small.start(attempt, environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    assert world.wait() == [0] * 3, world.logs()
    (found,) = [record.value for record in small.journal(attempt) if record.key == "layout_difference"]
    assert found is not None
    assert found < judging.EXACT.gradient


def test_a_fault_of_a_pipeline_is_refused(small: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = DeviceStages.weight
    monkeypatch.setattr(DeviceStages, "weight", lambda self, total, device: weight(self, 8, device))
    with pytest.raises(TrainingFailed, match="the gradient at step 2 of"):
        train(small, "pipeline-fault", parallelism=PIPELINE, verify_layout=True)


def test_random_networks_cannot_be_compared(small: Jobs, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="nothing to compare: the network draws random numbers"):
        train(small, "noise", model=recipe(tmp_path, "Noise()"), verify_layout=True)


def test_largest_difference() -> None:
    wanted = {"a": np.array([1.0, 4.0]), "b": np.array([100.0]), "c": np.zeros(2)}
    found = {"a": np.array([1.0, 4.5]), "b": np.array([100.1])}
    assert judging.largest_difference(found, wanted) == judging.Difference("a", 0.5, 0.125, 0.005)
    assert judging.largest_difference(found, wanted, floor=0.05) == judging.Difference("a", 0.5, 0.125, 0.1)
    assert judging.largest_difference(found, wanted, slack=900.0) == judging.Difference("a", 0.5, 0.125, 0.0005)
    assert judging.largest_difference({"c": np.array([0.0, np.nan])}, wanted).absolute == np.inf
    assert judging.largest_difference(wanted, wanted).share == 0
    assert judging.largest_difference({"c": np.ones(2)}, {"c": np.zeros(2)}).share == np.inf


@pytest.mark.parametrize(("size", "seen"), [(1e-3, True), (1e-10, True), (1e-14, False)])
def test_a_small_gradient_is_judged_by_itself(size: float, seen: bool) -> None:
    """One of 1e-14 of the largest may be rounding."""
    wanted = {"small": np.array([size, 0.0]), "large": np.ones(3)}
    found = {"small": np.array([2 * size, 0.0]), "large": np.ones(3)}
    bounds = judging.EXACT
    assert (judging.gradients(found, wanted, bounds).share > bounds.gradient) is seen


def test_what_float32_cannot_store_is_no_fault() -> None:
    weights = {"w": np.full(100, 1.0)}
    wanted = {"w": np.full(100, 1e-8)}
    bounds = judging.LOOSE
    assert judging.changes({"w": np.zeros(100)}, wanted, weights, bounds).share <= bounds.change
    wanted = {"w": np.full(100, 1e-3)}
    assert judging.changes({"w": 2 * wanted["w"]}, wanted, weights, bounds).share > bounds.change


def test_float16_is_bounded_by_the_gradients_that_are_added() -> None:
    """Two of norm 1: 2^-10 of their norms, added, and 2^-25 for each number of each."""
    assert verify.half_bound(2, 2.0, 16) == pytest.approx(2**-10 * 2.0 + 2 * 4 * 2**-25)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks of a script were told; the same."""
    folder = tmp_path_factory.mktemp("scripted")
    world = start(folder, [sys.executable, str(Path(__file__).with_name("script_checks.py")), str(folder)], 2)
    assert world.wait() == [0, 0], world.logs()
    first, second = ((folder / f"{rank}.json").read_text() for rank in range(2))
    assert first == second
    found: dict[str, Any] = json.loads(first)
    return found


def test_a_sound_script_passes(scripted: dict[str, Any]) -> None:
    difference, unchanged = scripted["sound"]
    assert difference < judging.EXACT.gradient
    assert unchanged


@pytest.mark.parametrize("fault", ["other_weights", "mean_of_means", "local_statistics", "not_reduced"])
def test_a_script_that_trains_otherwise_is_told(scripted: dict[str, Any], fault: str) -> None:
    message, unchanged = scripted[fault]
    assert re.match(r"the ranks do not train as one process does: the gradient of [0-2].\w+ differs by up to", message)
    assert unchanged
