"""``mxdist prune`` as a user runs it, on what a real job left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mxdist
from support.places import node_python


def mxdist_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PYTHONPATH": str(Path(mxdist.__file__).parents[1]), "MXDIST_NODE_PYTHON": str(node_python()),
        "MXDIST_RUNS_URI": str(folder / "runs"), "MXDIST_WORKDIR": str(folder / "jobs"),
    }  # fmt: skip
    command = [sys.executable, "-m", "mxdist.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_job_that_is_over_can_be_pruned_and_its_result_stays(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    (tmp_path / "job.json").write_text('{"name": "x", "script": {"path": "train.py"}}')
    assert mxdist_in(tmp_path, "run", "job.json", "--key", "job").returncode == 0
    scratch = tmp_path / "jobs" / "job" / "0000000001"
    assert (scratch / "code").is_dir()

    young = mxdist_in(tmp_path, "prune", "--scratch")
    assert (young.returncode, young.stdout) == (0, "freed 0.0 MB\n")
    assert "it ended a short while ago" in young.stderr
    dry = mxdist_in(tmp_path, "prune", "--scratch", "--older-than", "0s", "--dry-run")
    assert dry.stdout.startswith(f"{scratch}: ")
    assert "would free" in dry.stdout
    assert scratch.is_dir()
    done = mxdist_in(tmp_path, "prune", "--older-than", "0s")
    assert done.stdout.startswith(f"{scratch}: ")
    assert not scratch.exists()

    assert "[0] trained" in mxdist_in(tmp_path, "logs", "job").stdout
    assert "SUCCEEDED" in mxdist_in(tmp_path, "status", "job").stdout


def test_an_age_without_a_unit_is_refused(tmp_path: Path) -> None:
    wrong = mxdist_in(tmp_path, "prune", "--older-than", "7")

    assert wrong.returncode == 2
    assert "'7' must be a number and one of s, m, h, d" in wrong.stderr
