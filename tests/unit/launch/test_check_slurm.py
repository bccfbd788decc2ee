"""The command by which a preflight gets to the nodes of Slurm."""

from __future__ import annotations

from typing import Any

from mxdist.launch.check_slurm import srun_command
from mxdist.launch.hosts import place
from mxdist.spec.job import BaseJob


def words(**slurm: Any) -> list[str]:
    cluster = {"kind": "slurm", "nodes": 3, "slots": 2, "slurm": slurm}
    job = BaseJob.parse({"name": "x", "cluster": cluster, "parallelism": {"world_size": 6}})
    return srun_command(job, place(job), "/opt/node/bin/python")


def test_nodes_are_asked_for_as_the_job_asks() -> None:
    found = words(partition="gpu", account="lab", qos="high", gpus_per_node="a100:4", constraint="a&b", exclusive=True)
    assert found[0] == "srun"
    asked = {"--nodes=3", "--ntasks-per-node=1", "--partition=gpu", "--account=lab", "--qos=high",
             "--gpus-per-node=a100:4", "--constraint=a&b", "--exclusive"}  # fmt: skip
    assert asked <= set(found)


def test_it_takes_nothing_along_and_waits_for_nobody() -> None:
    found = words(time_limit_s=3600, requeue=True, output="/home/me/%j.out")
    assert {"--export=NONE", "--immediate=8", "--time=5", "--chdir=/"} <= set(found)
    assert [word for word in found if word.startswith(("--output", "--signal", "--requeue", "--dependency"))] == []
    assert found[found.index("/opt/node/bin/python") + 1] == "-I"
