"""``mxdist plan --estimate``, with the real node environment."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mxdist.cli.commands import main
from mxdist.data.stage import stage
from support.places import node_python


def job_file(folder: Path, **fields: object) -> Path:
    """Write a job of a network of 4 inputs, 8 hidden units and 2 classes."""
    source = folder / "source" / "train"
    source.mkdir(parents=True)
    np.save(source / "x.npy", np.zeros((8, 4), dtype=np.float32))
    np.save(source / "y.npy", np.arange(8) % 2)
    staged = stage(str(source.parent), str(folder / "data"), "tiny")
    dataset = {"manifest_uri": staged["manifest_uri"], "version": staged["version"]}
    model = {"name": "mlp", "params": {"hidden": 8, "layers": 1}}
    document = {"name": "tiny", "model": model, "dataset": dataset, "batch_size": 4, "epochs": 1, **fields}
    path = folder / "job.json"
    path.write_text(json.dumps(document))
    return path


def test_the_memory_stands_below_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 x 8 + 9 x 2 numbers of 4 bytes, and a momentum for each."""
    monkeypatch.setenv("MXDIST_NODE_PYTHON", str(node_python()))
    places = ["--runs", str(tmp_path / "runs"), "--workdir", str(tmp_path / "work")]
    path = str(job_file(tmp_path, parallelism={"world_size": 2}))
    assert main(["plan", path, "--estimate", "--json", *places]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert [rank["stages"][0]["count"] for rank in memory["ranks"]] == [58, 58]
    assert memory["checkpoint"] == 58 * 4 * 2
    assert main(["plan", path, "--estimate", *places]) == 0
    assert "memory, estimated, in MiB" in capsys.readouterr().out


def test_what_cannot_be_estimated_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXDIST_NODE_PYTHON", str(node_python()))
    (tmp_path / "train.py").write_text("pass")
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"name": "own", "script": {"path": str(tmp_path / "train.py")}}))
    places = ["--runs", str(tmp_path / "runs"), "--workdir", str(tmp_path / "work")]
    assert main(["plan", str(path), "--estimate", *places]) != 0
    assert "only a training of mxdist's own loop has a memory" in capsys.readouterr().err
