"""Horovod over MPI: what the plan lays out."""

from __future__ import annotations

from typing import Any

from mxdist.launch.plan import SECRET_NAMES, Plan, build_plan
from mxdist.spec import parse_job

PYTHON = "/node/bin/python"


def plan(**parallelism: Any) -> Plan:
    job = parse_job({"name": "a", "script": {"path": "train.py"}, "parallelism": parallelism})
    return build_plan(job, "key", runs_uri="s3://runs", python=PYTHON, workdir="/scratch", cores=(0, 1))


def test_mpirun_starts_all_ranks() -> None:
    command = plan(world_size=2, controller="mpi").starter
    assert command[:5] == ("mpirun", "--host", "127.0.0.1:2", "-np", "2")
    assert command[-3:] == (PYTHON, "-m", "mxdist.runtime.rank")
    passed = {command[at + 1] for at, word in enumerate(command) if word == "-x"}
    assert {"MXDIST_TOKEN", "MXDIST_WORLD_DIR", "OMP_NUM_THREADS", "HOROVOD_CONTROLLER", *SECRET_NAMES} <= passed
    assert not passed & {"HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_GLOO_IFACE"}
    assert not [word for word in command if "=" in word]  # names travel, values do not


def test_variables_are_those_of_mpi() -> None:
    environment = plan(world_size=2, controller="mpi").ranks[0].environment
    assert environment["HOROVOD_CONTROLLER"] == environment["HOROVOD_CPU_OPERATIONS"] == "mpi"
    assert not [name for name in environment if "GLOO" in name]
    assert {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"} <= environment.keys()


def test_plan_shows_the_starter_only_over_mpi() -> None:
    assert "\nstarter     mpirun --host 127.0.0.1:2 -np 2 " in plan(world_size=2, controller="mpi").describe()
    assert plan(world_size=2).starter == ()
    assert "starter" not in plan(world_size=2).describe()
