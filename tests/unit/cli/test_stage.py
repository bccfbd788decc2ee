"""``mxdist stage`` as a user runs it, and a job that takes what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import mxdist
from support.places import node_python

JOB = "name: x\nmodel: {name: mlp}\ndataset: {labels: [1, 0]}\nbatch_size: 8\n"


def mxdist_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PYTHONPATH": str(Path(mxdist.__file__).parents[1]), "MXDIST_NODE_PYTHON": str(node_python()),
        "MXDIST_RUNS_URI": str(folder / "runs"), "MXDIST_WORKDIR": str(folder / "jobs"), "XDG_STATE_HOME": str(folder),
    }  # fmt: skip
    environment.pop("MXDIST_DATA_URI", None)
    command = [sys.executable, "-m", "mxdist.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with 200 rows of two classes in ``source/``, and a job file that only lacks a dataset."""
    (tmp_path / "source").mkdir()
    np.save(tmp_path / "source" / "x.npy", np.random.default_rng(0).integers(0, 256, (200, 1, 8, 8), np.uint8))
    np.save(tmp_path / "source" / "y.npy", np.arange(200) % 2)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def test_what_it_prints_is_a_part_of_a_job_file(folder: Path) -> None:
    done = mxdist_in(folder, "stage", "source", "--name", "toy", "--data", "data", "--split", "0.6,0.2,0.2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("mxdist: toy: 200 rows in 6 files, ")
    printed = yaml.safe_load(done.stdout)
    dataset = printed["dataset"]
    assert printed == {"dataset": {"manifest_uri": dataset["manifest_uri"], "version": dataset["version"]}}
    manifest = json.loads(Path(dataset["manifest_uri"]).read_text())
    assert manifest["version"] == dataset["version"]
    assert {file["path"].partition("/")[0] for file in manifest["files"]} == {"train", "validation", "test"}

    (folder / "toy.yaml").write_text(done.stdout)
    planned = mxdist_in(folder, "plan", "job.yaml", "--dataset-from", "toy.yaml", "--json")
    assert planned.returncode == 0, planned.stderr
    told = mxdist_in(folder, "status", "job.yaml", "--dataset-from", "toy.yaml")
    assert (told.returncode, "toy" in told.stderr) == (4, False), "the file is read; nobody has run it"


def test_the_same_again_sends_nothing(folder: Path) -> None:
    first, second = (mxdist_in(folder, "stage", "source", "--name", "toy", "--json") for _ in range(2))
    one, two = json.loads(first.stdout), json.loads(second.stdout)
    assert (one["uploaded_files"], two["uploaded_files"]) == (2, 0)
    assert (one["version"], one["manifest_uri"]) == (two["version"], two["manifest_uri"])
    assert one["manifest_uri"].startswith(str(folder / "mxdist" / "data")), "beside the run store that has no name"
    (folder / "toy.json").write_text(first.stdout)
    assert mxdist_in(folder, "plan", "job.yaml", "--dataset-from", "toy.json").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["nowhere", "--name", "toy"], 5, "there is no folder 'nowhere'"),
        (["source"], 2, "--name"),
        (["source", "--name", "toy", "--split", "0.6,0.2"], 2, "'0.6,0.2' must be three numbers"),
        (["source", "--name", "toy", "--split", "0.6,0.2,0.1"], 2, "train + validation + test must be 1, not 0.9"),
        (["source", "--name", "toy", "--as-of", "yesterday"], 5, "'yesterday' is not an ISO 8601 date"),
    ],
)
def test_what_cannot_be_staged_is_told(folder: Path, arguments: list[str], code: int, told: str) -> None:
    done = mxdist_in(folder, "stage", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_without_its_dataset_says_how_to_get_one(folder: Path) -> None:
    (folder / "job.yaml").write_text("name: x\nmodel: {name: mlp}\n")
    done = mxdist_in(folder, "plan", "job.yaml")
    assert done.returncode == 2
    assert "dataset: is required to train a model; `mxdist stage` makes one" in done.stderr
