"""``mxdist preflight`` as a user runs it, on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mxdist
from support.places import node_python


def run(folder: Path, *options: str, **environment: str) -> tuple[int, str, str]:
    (folder / "train.py").write_text("")
    job = {"name": "x", "script": {"path": "train.py"}, "parallelism": {"world_size": 2}}
    (folder / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "mxdist.cli", "preflight", "job.yaml", *options]
    known = {
        **os.environ, "PYTHONPATH": str(Path(mxdist.__file__).parents[1]), "MXDIST_NODE_PYTHON": str(node_python()),
        "MXDIST_RUNS_URI": str(folder / "runs"), "MXDIST_WORKDIR": str(folder / "work"), **environment,
    }  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_ready_host_is_told_in_one_table(tmp_path: Path) -> None:
    code, out, err = run(tmp_path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "preflight of x: 1 local host"
    assert lines[2].split() == ["host", "store", "login", "names", "clock", "disk", "versions", "devices"]
    assert [line.split()[0] for line in lines[3:5]] == ["(submitter)", "127.0.0.1"]
    assert lines[-1] == "no problems"
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "environment", "problem"),
    [
        ((), {"MXDIST_NODE_PYTHON": "/none/python"}, "127.0.0.1: login: there is no Python at /none/python"),
        ((), {"MXDIST_NODE_PYTHON": ""}, "(submitter): python: no Python of the node environment is known"),
        (("--set", "tracking.uri=http://127.0.0.1:9"), {}, "127.0.0.1: mlflow: <urlopen error [Errno 111]"),
        (("--workdir", "/proc/none"), {}, "127.0.0.1: disk: cannot write to /proc/none"),
        (("--runs", "s3://none/runs", "--endpoint-url", "http://127.0.0.1:9"), {}, "(submitter): store:"),
    ],
    ids=["python", "no python", "mlflow", "disk", "store"],
)
def test_every_problem_is_told_and_the_exit_code_is_three(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], problem: str
) -> None:
    code, out, err = run(tmp_path, *options, **environment)
    assert (code, err) == (3, "")
    assert f"\n  {problem}" in out


def test_problems_as_values(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "--json", "--workdir", "/proc/none")
    told = json.loads(out)
    assert code == 3
    assert [(one["host"], one["check"]) for one in told["problems"]] == [("127.0.0.1", "disk")]
    assert told["hosts"]["127.0.0.1"]["versions"] == "mxnet 1.9.1"
