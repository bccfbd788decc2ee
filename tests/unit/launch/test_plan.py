"""The plan against golden files: a change of what runs is seen in a review."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mxdist.launch.plan import SECRET_NAMES, Plan, build_plan
from mxdist.spec import parse_job

GOLDEN = Path(__file__).parent / "golden"
MANIFEST = {"manifest_uri": "s3://data/mnist/manifests/1.json", "version": "0" * 64}

JOBS: dict[str, dict[str, Any]] = {
    "script_two_ranks": {
        "name": "cifar",
        "script": {
            "path": "/home/ada/train.py",
            "args": ["--lr", "0.1"],
            "env": {"DATA": "/data", "OMP_NUM_THREADS": "3"},
        },
        "parallelism": {"world_size": 2, "fusion_threshold_mb": 32, "cycle_time_ms": 2.5},
        "limits": {"stall_timeout_s": 60, "start_timeout_s": 45.5, "deadline_s": 3600},
    },
    "parameter_servers": {
        "name": "mnist",
        "model": {"name": "lenet"},
        "dataset": MANIFEST,
        "parallelism": {"strategy": "parameter_server", "world_size": 2, "servers": 2},
    },
    "servers_on_three_hosts": {
        "name": "mnist",
        "model": {"name": "lenet"},
        "dataset": MANIFEST,
        "batch_size": 60,
        "parallelism": {"strategy": "parameter_server", "world_size": 5, "servers": 2},
        "cluster": {"kind": "ssh", "hosts": ["ada@gpu-node-1:2", "gpu-node-2:2 port=2222", "gpu-node-3:2"]},
    },
    "slurm_two_nodes": {
        "name": "cifar",
        "script": {"path": "/home/ada/train.py"},
        "parallelism": {"world_size": 4},
        "cluster": {"kind": "slurm", "nodes": 2, "threads_per_rank": 3, "pin_cores": False},
    },
    "model_one_rank": {"name": "mnist", "model": {"name": "lenet"}, "dataset": MANIFEST, "epochs": 3},
    "evaluation": {
        "kind": "evaluation",
        "name": "score",
        "models": {"challenger": "s3://runs/a/model"},
        "dataset": MANIFEST,
    },
}


def plan_of(document: dict[str, Any], cores: tuple[int, ...] = (0, 1, 2, 3)) -> Plan:
    return build_plan(
        parse_job(document), "key-1", runs_uri="s3://runs", python="/node/bin/python", workdir="/scratch", cores=cores
    )


@pytest.mark.parametrize("name", JOBS)
def test_description_is_the_golden_one(name: str) -> None:
    plan = plan_of(JOBS[name])
    described = plan.describe().replace(plan.digest, "<digest>")  # which changes with every new field of a job
    assert described == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", JOBS)
def test_document_is_plain_json(name: str) -> None:
    document = plan_of(JOBS[name]).to_document()

    assert json.loads(json.dumps(document))["job_key"] == "key-1"


@pytest.mark.parametrize(
    ("cores", "ranks", "pin", "expected"),
    [
        ((0, 1), 2, True, [(0,), (1,)]),
        ((0, 1, 2, 3), 2, True, [(0, 1), (2, 3)]),
        ((7, 5, 3), 2, True, [(3,), (5,)]),
        ((0, 1), 3, True, [(), (), ()]),
        ((0, 1), 2, False, [(), ()]),
        ((0, 1), 1, True, [()]),
    ],
)
def test_ranks_get_cores_of_their_own_when_there_are_enough(
    cores: tuple[int, ...], ranks: int, pin: bool, expected: list[tuple[int, ...]]
) -> None:
    document = {**JOBS["script_two_ranks"], "parallelism": {"world_size": ranks}, "cluster": {"pin_cores": pin}}

    assert [rank.cores for rank in plan_of(document, cores).ranks] == expected


@pytest.mark.parametrize(
    ("cores", "ranks", "asked", "threads"), [(4, 2, None, "2"), (4, 1, None, "4"), (2, 4, None, "1"), (4, 2, 7, "7")]
)
def test_threads_fill_the_cores(cores: int, ranks: int, asked: int | None, threads: str) -> None:
    document = {"name": "x", "script": {"path": "/a.py"}, "parallelism": {"world_size": ranks}}
    plan = plan_of({**document, "cluster": {"threads_per_rank": asked}}, tuple(range(cores)))

    assert {rank.environment["OMP_NUM_THREADS"] for rank in plan.ranks} == {threads}


@pytest.mark.parametrize("stall_s", [0.5, 1, 2, 5, 6, 299.5, 300])
def test_horovod_shuts_down_after_it_has_warned(stall_s: float) -> None:
    document = {"name": "x", "script": {"path": "/a.py"}, "limits": {"stall_timeout_s": stall_s}}
    environment = plan_of(document).ranks[0].environment
    warn_s = int(environment["HOROVOD_STALL_CHECK_TIME_SECONDS"])
    shutdown_s = int(environment["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"])

    assert 1 <= warn_s < shutdown_s
    assert shutdown_s >= stall_s


@pytest.mark.parametrize(("across", "values"), [("processes", ["1", "1"]), ("devices", [None])])
def test_stages_on_ranks_need_process_sets(across: str, values: list[str | None]) -> None:
    stages = {"strategy": "pipeline", "stages": 2, "across": across, "world_size": len(values)}
    dataset = {"manifest_uri": "s3://data/mnist/manifests/1.json", "version": "ab" * 32}
    model: dict[str, Any] = {"model": {"name": "lenet"}, "dataset": dataset}
    ranks = plan_of({"name": "x", **model, "parallelism": stages}).ranks
    assert [rank.environment.get("HOROVOD_DYNAMIC_PROCESS_SETS") for rank in ranks] == values


def test_no_secret_is_in_a_plan() -> None:
    for name in JOBS:
        plan = plan_of(JOBS[name])
        environments = [one.environment for one in (*plan.ranks, *plan.roles)]
        assert not set(SECRET_NAMES) & {key for environment in environments for key in environment}


def test_every_process_of_parameter_servers_knows_the_same_world() -> None:
    plan = plan_of(JOBS["parameter_servers"])
    members = [*plan.ranks, *plan.roles]
    names = ("DMLC_PS_ROOT_URI", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_NODE_HOST")

    assert [role.name for role in plan.roles] == ["scheduler", "server 0", "server 1"]
    assert {tuple(member.environment[name] for name in names) for member in members} == {
        ("127.0.0.1", "2", "2", "127.0.0.1")
    }
    assert [member.environment["DMLC_ROLE"] for member in members] == [
        "worker", "worker", "scheduler", "server", "server"
    ]  # fmt: skip
    assert "DMLC_PS_ROOT_PORT" in plan.runtime_names


def test_ranks_of_several_hosts_are_told_where_they_are_at_the_start_only() -> None:
    plan = plan_of(JOBS["servers_on_three_hosts"])
    located = {"HOROVOD_HOSTNAME", "HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "OMP_NUM_THREADS"}
    located |= {"DMLC_NODE_HOST", "DMLC_PS_ROOT_URI", "NCCL_SOCKET_IFNAME"}

    assert not [rank.rank for rank in plan.ranks if located & rank.environment.keys()]
    assert located <= set(plan.runtime_names)
    assert [(rank.host, rank.environment["HOROVOD_CROSS_RANK"]) for rank in plan.ranks] == [
        ("gpu-node-1", "0"), ("gpu-node-1", "0"), ("gpu-node-2", "1"), ("gpu-node-2", "1"), ("gpu-node-3", "2")
    ]  # fmt: skip
    assert [(role.name, role.host) for role in plan.roles] == [
        ("scheduler", "gpu-node-1"), ("server 0", "gpu-node-1"), ("server 1", "gpu-node-2")
    ]  # fmt: skip


def test_scripts_get_parameter_servers_too_and_other_jobs_none() -> None:
    script = {**JOBS["script_two_ranks"], "parallelism": {"strategy": "parameter_server", "world_size": 2}}

    assert [role.name for role in plan_of(script).roles] == ["scheduler", "server 0"]
    assert plan_of(script).ranks[1].environment["DMLC_ROLE"] == "worker"
    for name in ("script_two_ranks", "evaluation"):
        assert plan_of(JOBS[name]).roles == ()
        assert not [key for key in plan_of(JOBS[name]).ranks[0].environment if key.startswith("DMLC_")]
