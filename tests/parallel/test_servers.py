"""Gradients through MXNet's parameter servers: what one process computes, up to float32; and the lossy kinds.

KVStore computes in float32, so trainings drift apart by rounding. Therefore the gradient of each step is compared with
that of a plain network in one process, *from the same weights*; the final weights only of a case that is stable, with
those of the reference in float64.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from parallel import servers_checks
from parallel.reference import build
from parallel.test_law import Law, make_law
from parallel.test_law_models import NORM, RESNET, SIZE, TOGETHER, sequences
from parallel.worlds import BOUND_S, World, images, jobs, poll, start

from mxdist.launch.roles import plan_roles, worker_environment
from mxdist.runtime.checkpoint import Checkpoints
from mxdist.runtime.counting import Counting, counter, told
from mxdist.runtime.parallel.servers import RemoteUpdate
from mxdist.spec import Optimizer
from mxdist.store import Attempt

pytestmark = pytest.mark.layouts

GRADIENT_BOUND = 1e-6
"""Over the norm: float32 rounds by 6e-8, and only the order in which rows are added is another one."""

WEIGHT_BOUND = 1e-4
"""After 20 steps of a stable case: each of them rounds weights of about 1 by 6e-8, and errors grow on the way."""

SERVERS = {"strategy": "parameter_server"}
FREE = {**SERVERS, "kvstore": "dist_async", "lossy": ["dist_async"]}
SPLIT = {"MXNET_KVSTORE_BIGARRAY_BOUND": "100"}
"""From how many numbers on an array is split over all servers."""


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> Law:
    """73 examples: the last batch of an epoch has one row, so one of two workers has none."""
    return make_law(tmp_path_factory.mktemp("servers") / "sgd", "sgd", 73)


def trained(
    law: Law, mutation: str = "nothing", fields: Mapping[str, Any] = MappingProxyType({}), **parallelism: Any
) -> tuple[Attempt, World]:
    """Train on two workers to the end."""
    law.made += 1
    document = {"parallelism": {**SERVERS, **parallelism}, "dtype": "float32", **fields}
    attempt = law.jobs.claim(law._job(2, document), f"servers-{law.made}")
    world = law.jobs.start(attempt, mutation=mutation, environment=SPLIT)
    codes = world.wait()
    assert set(codes) == {0}, f"{codes}\n{world.logs()}"
    return attempt, world


def worst_gradient(law: Law, world: World) -> float:
    """Return how far a step's gradient is from that of one process with these weights, over its norm; the worst."""
    with np.load(law.case["data"]) as data:
        x, y = data["x"], data["y"]
    net, scale = build(law.case, int(y.max()) + 1), 1 / 255 if x.dtype == np.uint8 else 1
    net.initialize()
    net(mx.nd.ones((1, *x.shape[1:])))
    every = net._collect_params_with_prefix()
    parameters = {name: parameter for name, parameter in every.items() if parameter.grad_req != "null"}
    loss_function, step, worst = gluon.loss.SoftmaxCrossEntropyLoss(), 0, 0.0
    for epoch in range(law.case["epochs"]):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([law.case["seed"], epoch])))
        order = generator.permutation(len(x))
        for begin in range(0, len(x), law.case["batch_size"]):
            rows, step = order[begin : begin + law.case["batch_size"]], step + 1
            with np.load(world.folder / f"step-{step}-rank-0.npz") as kept:
                found = {name: kept[f"gradient/{name}"] for name in parameters}
                for name, parameter in parameters.items():
                    parameter.set_data(mx.nd.array(kept[f"weight/{name}"]))
            with autograd.record():
                scores = net(mx.nd.array(x[rows], dtype="float32") * scale)
                loss = loss_function(scores, mx.nd.array(y[rows])).mean()
            loss.backward()
            exact = np.concatenate([parameter.grad().asnumpy().ravel() for parameter in parameters.values()])
            ours = np.concatenate([found[name].ravel() for name in parameters])
            worst = max(worst, float(np.linalg.norm(ours - exact) / np.linalg.norm(exact)))
    assert step == 20
    return worst


def test_workers_hold_the_law_and_servers_make_no_difference(law: Law) -> None:
    attempt, world = trained(law, "gradients_kept")
    assert worst_gradient(law, world) < GRADIENT_BOUND
    assert law.off(attempt) < WEIGHT_BOUND
    one = law.jobs.exported(attempt)
    for servers, verify in ((2, True), (3, False)):
        again, _ = trained(law, fields={"verify_layout": verify}, servers=servers, kvstore="dist_device_sync")
        several = law.jobs.exported(again)
        assert all((one[name] == several[name]).all() for name in one)
        assert ("layout_difference" in {record.key for record in law.jobs.journal(again)}) == verify


def test_law_holds_for_adam_in_parts(tmp_path: Path) -> None:
    law = make_law(tmp_path / "adam", "adam", 77)  # 5 rows are left: 2 and 3
    attempt, world = trained(law, "gradients_kept", accumulate=2, servers=2)
    assert worst_gradient(law, world) < GRADIENT_BOUND
    assert law.off(attempt) < WEIGHT_BOUND


def test_batch_norm_takes_the_statistics_of_all_workers(tmp_path: Path) -> None:
    law = make_law(tmp_path / "norm", "sgd", 80, network="lenet_norm")
    attempt, _ = trained(law, "nothing", {"model": NORM}, **TOGETHER["parallelism"])
    assert law.off(attempt) < 10 * WEIGHT_BOUND  # it divides by deviations, which are small


@pytest.mark.parametrize(
    ("network", "optimizer", "rows", "bound"),
    [
        ("mlp", "sgd", 77, GRADIENT_BOUND),
        ("resnet", "adam", 77, 10 * GRADIENT_BOUND),  # BatchNorm divides by deviations, which are small
        ("encoder", "adam", 73, GRADIENT_BOUND),
    ],
)
def test_other_networks_hold_the_law(tmp_path: Path, network: str, optimizer: str, rows: int, bound: float) -> None:
    (tmp_path / "resnet.py").write_text(RESNET)
    model: dict[str, Any] = {
        "mlp": {"name": "mlp", "params": {"hidden": 16}},
        "resnet": {"recipe": str(tmp_path / "resnet.py")},
        "encoder": {"name": "transformer_encoder", "params": {**SIZE, "pad_id": 0}},
    }[network]
    shape = (3, 16, 16) if network == "resnet" else (1, 16, 16)
    data = sequences(rows) if network == "encoder" else None
    law = make_law(tmp_path / network, optimizer, rows, network=network, shape=shape, data=data)
    _, world = trained(law, "gradients_kept", {"model": model}, **TOGETHER["parallelism"])
    assert worst_gradient(law, world) < bound


FAULTS = ["no_averaging", "clip_before_reduce", "wrong_weight_for_last_batch", "data_repeated", "stale_pull"]


@pytest.mark.parametrize("mutation", FAULTS)
def test_each_seeded_fault_breaks_the_law(law: Law, mutation: str) -> None:
    _, world = trained(law, f"{mutation}+unchecked+gradients_kept")
    assert worst_gradient(law, world) > 1000 * GRADIENT_BOUND


def test_servers_end_by_themselves_when_the_workers_have_left(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(24)})
    job = small.job(parallelism={**SERVERS, "world_size": 1, "servers": 2}, dtype="float32", epochs=1)
    world = small.start(small.claim(job, "alone"))
    try:
        members = [*world.processes, *world.helpers]
        poll(lambda: all(process.poll() is not None for process in members), what="all to end", bound_s=BOUND_S)
        assert [process.returncode for process in members] == [0, 0, 0, 0], world.logs()
    finally:
        world.end()


def test_one_free_worker_trains_as_one_process(tmp_path: Path) -> None:
    """The optimizer runs on the servers; nobody else pushes, so nothing is late."""
    law = make_law(tmp_path / "plain", "plain", 73)
    attempt = law.jobs.claim(law._job(1, {"parallelism": {**FREE, "servers": 2}, "dtype": "float32"}), "free")
    world = law.jobs.start(attempt, environment=SPLIT)
    assert world.wait() == [0], world.logs()
    assert law.off(attempt) < WEIGHT_BOUND
    records = law.jobs.journal(attempt)
    assert [record.value for record in records if record.key == "staleness_max"] == [0.0, 0.0]


def test_free_workers_converge_agree_and_tell_how_late_they_are(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(65)})  # one row is left: one worker has none
    optimizer = {"learning_rate": 0.05, "momentum": 0.0}  # calm: also where one worker is a whole epoch behind
    job = small.job(parallelism={**FREE, "world_size": 2}, dtype="float32", epochs=16, optimizer=optimizer)
    attempt = small.claim(job, "free")
    world = small.start(attempt)
    assert world.wait() == [0, 0], world.logs()
    values = {
        key: [record.value for record in small.journal(attempt) if record.key == key]
        for key in ("train_loss", "staleness_mean", "staleness_max")
    }
    assert values["train_loss"][-1] < 0.5 * values["train_loss"][0]
    assert all(0 < mean <= most for mean, most in zip(values["staleness_mean"], values["staleness_max"], strict=True))
    saved = Checkpoints(attempt, keep=1).newest()
    assert saved is not None
    assert {name.partition("/")[0] for name in saved.arrays} == {"param"}, "the servers have the optimizer's state"


def test_servers_count_the_updates_that_came_in_between() -> None:
    optimizer = pickle.loads(pickle.dumps(Counting(mx.optimizer.SGD(learning_rate=0.5, momentum=0.9), 7), 0))
    update, counted = mx.optimizer.get_updater(optimizer), counter(3)
    seen = {worker: counted.copy() for worker in range(3)}
    late = []
    for worker in (0, 1, 1, 2, 0):
        update(7, told(seen[worker], worker), counted)
        seen[worker] = counted.copy()
        late.append(float(counted[1 + worker].asscalar()))
    assert late == [0, 1, 0, 3, 3]
    weight = mx.nd.ones((2,))
    update(3, mx.nd.ones((2,)), weight)
    assert weight.asnumpy().tolist() == [0.5, 0.5]


def test_pushes_of_all_workers_make_one_step_together() -> None:
    """Weight decay and the rate are for the global batch: 4 pushes of a quarter each add up to one plain step."""
    parameter = gluon.Parameter("w", shape=(2,), lr_mult=2.0)
    parameter.initialize(mx.init.One())
    spec = Optimizer(learning_rate=1e-3, momentum=0.0, weight_decay=0.5)
    remote = RemoteUpdate(spec, {"w": parameter}, 10).remote(4)
    weight, update = mx.nd.ones((2,)), mx.optimizer.get_updater(pickle.loads(pickle.dumps(remote, 0)))
    for _ in range(4):
        update(0, mx.nd.array([0.25, -0.5]), weight)
    expected = 1 - 1e-3 * 2.0 * (np.array([1.0, -2.0]) + 0.5)
    assert np.abs(weight.asnumpy() - expected).max() < 4e-6  # decay acts on weights that have moved a little


def test_two_bits_are_what_is_stated(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(24)})
    job = small.job(parallelism={**SERVERS, "world_size": 2, "servers": 2}, dtype="float32")
    folder, script = tmp_path / "checks", str(Path(servers_checks.__file__))
    environment = {**worker_environment(job), "MXNET_KVSTORE_BIGARRAY_BOUND": "1000"}
    world = start(folder, [sys.executable, script, str(folder)], 2, environment, plan_roles(job, sys.executable))
    assert world.wait() == [0, 0], world.logs()
    received = [np.array(json.loads((folder / f"{rank}.json").read_text())) for rank in range(2)]
    assert (received[0] == received[1]).all()
    each = [servers_checks.gradients(rank).astype(np.float64) for rank in range(2)]
    assert (received[0] == _in_two_bits(each[0]) + _in_two_bits(each[1])).all()
    held_back = np.abs(np.cumsum(received[0], axis=0) - np.cumsum(each[0] + each[1], axis=0))
    assert held_back.max() < 2 * servers_checks.THRESHOLD


def _in_two_bits(gradients: np.ndarray) -> np.ndarray:
    """Return what a worker sends, by the definition: t, -t or 0; the rest is kept for the next step."""
    kept, sent = np.zeros(gradients.shape[1]), []
    for gradient in gradients:
        kept = kept + gradient
        sign = (kept >= servers_checks.THRESHOLD).astype(float) - (kept <= -servers_checks.THRESHOLD)
        sent.append(sign * servers_checks.THRESHOLD)
        kept = kept - sent[-1]
    return np.array(sent)


def test_training_with_two_bits_converges(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(64)})
    parallelism = {**SERVERS, "world_size": 2, "compression": "2bit", "compression_threshold": 0.01}
    optimizer = {"learning_rate": 0.1, "momentum": 0.5}
    job = small.job(
        parallelism={**parallelism, "lossy": ["compression"]}, dtype="float32", epochs=8, optimizer=optimizer
    )
    attempt = small.claim(job, "two-bit")
    world = small.start(attempt)
    assert world.wait() == [0, 0], world.logs()
    losses = [record.value for record in small.journal(attempt) if record.key == "train_loss"]
    assert losses[-1] < 0.5 * losses[0]
