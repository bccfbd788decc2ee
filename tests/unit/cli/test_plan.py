"""``mxdist plan``: what is handed to each platform, what it costs, and what has changed."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mxdist.cli.commands import main
from mxdist.spec import JobState, parse_job
from mxdist.store import JobRun, Result, open_store

GOLDEN = Path(__file__).with_name("golden")
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """``mxdist plan`` in a folder with a script; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MXDIST_SSH", "AWS_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MXDIST_NODE_PYTHON", "/bin/true")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("MXDIST_WORKDIR", "/scratch")
    (tmp_path / "train.py").write_text("")

    def run(job: dict[str, Any], *options: str) -> tuple[int, str, str]:
        document = {"name": "digits", "script": {"path": "train.py"}, **job}
        (tmp_path / "job.json").write_text(json.dumps(document))
        code = main(["plan", "job.json", "--runs", str(tmp_path / "runs"), *options])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def remember(folder: Path, **fields: Any) -> None:
    """Leave behind what an earlier run of the job does."""
    runs = open_store(str(folder / "runs"))
    job = parse_job({"name": "digits", "script": {"path": str(folder / "train.py")}, **fields})
    runs.create_json("_jobs/digits-1", {})
    JobRun(runs, "digits-1").claim(job, after=0).finish(
        Result(state=JobState.SUCCEEDED, ended_at=0.0, duration_s=720.0)
    )


def test_cost_and_changes_end_the_plan(plan: Plan, tmp_path: Path) -> None:
    remember(tmp_path, limits={"grace_s": 4})
    code, out, err = plan({"cluster": {"price_per_slot_hour": 10}, "parallelism": {"world_size": 3}})
    assert (code, err) == (0, "")
    tail = out[out.index("\ncost ") :]
    told = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "<when>", tail)
    assert told == (GOLDEN / "plan_changes.txt").read_text()


def test_plan_is_the_same_without_a_last_run(plan: Plan, tmp_path: Path) -> None:
    code, before, _ = plan({})
    assert (code, "since" in before, "cost" in before) == (0, False, False)
    assert not (tmp_path / "runs").exists()
    code, _, err = plan({}, "--diff")
    assert code == 4
    assert "no run of a job named 'digits' is known" in err
    remember(tmp_path)
    assert plan({}, "--no-diff")[1] == before
    assert plan({})[1].endswith("\n  nothing has changed\n")


def test_plan_as_values(plan: Plan, tmp_path: Path) -> None:
    remember(tmp_path)
    told = json.loads(plan({"cluster": {"price_per_slot_hour": 10}}, "--json")[1])
    assert told["cost"]["total"] == pytest.approx(2.0)
    assert told["since"]["job_key"] == "digits-1"
    assert told["since"]["changes"] == [{"path": "cluster.price_per_slot_hour", "before": "(none)", "now": "10.0"}]
    assert told["sends"] == []


def test_a_store_that_is_away_keeps_nobody_from_planning(plan: Plan) -> None:
    runs = ("--runs", "s3://none/runs", "--endpoint-url", "http://127.0.0.1:9")
    code, out, _ = plan({}, *runs)
    assert code == 0
    assert "\nnote: what has changed since the last run is not known: " in out
    assert plan({}, "--diff", *runs)[0] == 4


def sent(plan: Plan, cluster: dict[str, Any]) -> str:
    """Return what a plan says of a job of four ranks, from its limits on."""
    job = {"cluster": cluster, "parallelism": {"world_size": 4}}
    code, out, err = plan(job, "--runs", "s3://bucket/runs", "--no-diff")
    assert (code, err) == (0, "")
    return out[out.index("\nlimits\n") :]


def test_commands_to_ssh_hosts_are_shown(plan: Plan) -> None:
    hosts = ["ada@node1:2", "node2:2"]
    told = sent(plan, {"kind": "ssh", "hosts": hosts, "python": "/opt/node/bin/python", "workdir": "/scratch"})
    assert told[told.index("\ncommand on") :] == (GOLDEN / "plan_ssh.txt").read_text()


def test_script_for_slurm_is_shown(plan: Plan) -> None:
    cluster = {"kind": "slurm", "nodes": 2, "slots": 2, "python": "/opt/node/bin/python", "slurm": {"partition": "gpu"}}
    told = sent(plan, cluster)
    script = textwrap.dedent(told.partition("\nsbatch script, on this host\n")[2])
    assert script.startswith("#!/bin/bash")
    assert {"#SBATCH --nodes=2", "#SBATCH --partition=gpu"} <= set(script.splitlines())


def test_manifest_for_kubernetes_is_shown(plan: Plan) -> None:
    told = sent(plan, {"kind": "kubernetes", "nodes": 2, "slots": 2, "kubernetes": {"image": "registry/node:1"}})
    text, _, note = told.partition("\nMPIJob to namespace default\n")[2].partition("\nnote: ")
    assert note.startswith("the cluster was not asked: ")
    manifest = yaml.safe_load(textwrap.dedent(text))
    assert (manifest["kind"], manifest["spec"]["slotsPerWorker"]) == ("MPIJob", 2)
    assert manifest["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
