"""The example jobs: short, listed, typed as they say, and laid out as they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mxdist.cli.commands import main
from support.job_examples import FOLDER, JOBS, commands
from support.places import REPOSITORY, node_python

PLANS = {
    "horovod_cifar": ["allreduce: 2 ranks", "64 a step, 32 a rank", "summed over 2 ranks by Horovod"],
    "hybrid": [
        "hybrid, inside pipeline: 2 ranks, 2 devices each",
        "in 2 micro-batches, 1F1B",
        "over 2 ranks by Horovod",
    ],
    "model_parallel": ["model: 1 rank, 2 devices", "[device 1: stage 1 from output]"],
    "multi_node": ["allreduce: 2 ranks", "64 a step, 32 a rank"],
    "parameter_server": ["parameter_server: 2 ranks", "scheduler", "to 1 server (dist_sync)"],
    "pipeline": ["pipeline: 2 ranks", "stage 1 from features.2]", "in 4 micro-batches, 1F1B"],
    "pipeline_devices": ["pipeline: 1 rank, 2 devices", "in 4 micro-batches, 1F1B", "as much time as the others"],
    "simple_nn": ["allreduce: 2 ranks", "64 a step, 32 a rank"],
    "two_devices": ["devices: 1 rank, 2 devices", "64 a step, about 32 a device"],
    "zoo_fine_tune": ["allreduce: 2 ranks"],
    "zoo_pretrain": ["one rank on one device"],
}
"""What the plan of each says: the thing that the example is there to show."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the examples' commands can be typed, without staging anything."""
    (tmp_path / "examples").symlink_to(FOLDER)
    dataset = {"manifest_uri": str(tmp_path / "manifest.json"), "version": "ab" * 32}
    for name in ("mnist.yaml", "cifar.yaml"):
        (tmp_path / name).write_text(json.dumps({"dataset": dataset}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MXDIST_NODE_PYTHON", str(node_python()))
    monkeypatch.setenv("MXDIST_RUNS_URI", str(tmp_path / "runs"))
    monkeypatch.setenv("MXDIST_WORKDIR", str(tmp_path / "jobs"))
    return tmp_path


def test_every_example_is_there() -> None:
    assert {job.stem for job in JOBS} == set(PLANS)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_its_commands_plan_what_it_shows(job: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = commands(job, "run")
    assert typed
    for arguments in typed:
        assert arguments[1] == f"examples/{job.name}"
        assert main(["plan", *(word.replace("URI", str(folder)) for word in arguments[1:])]) == 0
        told = capsys.readouterr().out
        grown = any("world_size" in word for word in arguments)
        assert [line for line in PLANS[job.stem] if line not in told] == [] or grown, told
    assert not (folder / "runs").exists()


def test_more_ranks_make_the_batch_grow(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, grown = commands(FOLDER / "multi_node.yaml", "run")
    assert main(["plan", *grown[1:]]) == 0
    told = capsys.readouterr().out
    assert "allreduce: 4 ranks" in told
    assert "128 a step, 32 a rank" in told, "4 ranks x batch_size 32 of one"
    assert "0.08" in told, "4 x the rate of one, 0.02"


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_it_is_one_page_and_listed(file: Path) -> None:
    if file.suffix in (".yaml", ".py"):
        assert len(file.read_text().splitlines()) <= 60
        assert f"`{file.name}`" in (REPOSITORY / "docs/examples.md").read_text()


def test_the_page_names_no_other_file() -> None:
    named = re.findall(r"`([\w]+\.(?:yaml|py))`", (REPOSITORY / "docs/examples.md").read_text())
    made_by_stage = {"mnist.yaml", "cifar.yaml"}
    assert set(named) - made_by_stage == {file.name for file in FOLDER.iterdir() if file.suffix in (".yaml", ".py")}
