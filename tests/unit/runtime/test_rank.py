"""How a rank begins and how it says that it ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest
from parallel.worlds import PLUGINS, images, jobs

from mxdist.errors import CheckpointError, DataError, Fenced, NonFiniteError, Problem, SpecError, StoreError
from mxdist.runtime.rank import classify

SCRIPT = """
import json, os, sys
import helper
assert __name__ == "__main__"
found = {"args": sys.argv[1:], "cwd": os.getcwd(), "helper": helper.VALUE, "file": __file__, "path": sys.path[0]}
found["mxdist"] = [name for name in sys.modules if name.startswith("mxdist")]
json.dump(found, open(sys.argv[1], "w"))
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (NonFiniteError("nan"), 84, "nonfinite"),
        (SpecError("The job", [Problem("a", "b")]), 81, "user_error"),
        (DataError("flipped"), 81, "data"),
        (StoreError("away"), 83, "StoreError"),
        (Fenced("old"), 81, "Fenced"),
        (CheckpointError("foreign"), 81, "CheckpointError"),
        (ConnectionResetError("peer"), 83, "rank_exit"),
        (MemoryError(), 83, "rank_exit"),
        (OSError(28, "No space left on device"), 83, "rank_exit"),
        (mx.MXNetError("Horovod has been shut down."), 83, "rank_exit"),
        (mx.MXNetError("Shape inconsistent, Provided = [3,4]"), 81, "user_error"),
        (ValueError("horovod is in the text of a user's error"), 81, "user_error"),
        (SystemExit(82), 82, "preempted"),
        (SystemExit(3), 81, "user_error"),
        (ZeroDivisionError("x"), 81, "user_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_whether_trying_again_can_help(error: BaseException, code: int, kind: str) -> None:
    assert classify(error) == (code, kind)


def run_rank(root: Path, job: dict[str, Any], **variables: str) -> tuple[int, Path]:
    """Run a rank by itself; return its exit code and the world's folder."""
    world = root / "job" / "1" / "world-1"
    world.mkdir(parents=True)
    (world / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ, "PYTHONPATH": str(PLUGINS), "MXDIST_WORLD_DIR": str(world),
        "MXDIST_ATTEMPT_DIR": str(world.parent), **variables,
    }  # fmt: skip
    command = [sys.executable, "-m", "mxdist.runtime.rank"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    (world / "output").write_text(done.stdout + done.stderr)
    return done.returncode, world


def test_a_script_runs_as_if_started_by_hand(tmp_path: Path) -> None:
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 3\n")
    (folder / "train.py").write_text(SCRIPT)
    script = {"path": str(folder / "train.py"), "args": [str(tmp_path / "out.json"), "--n", "2"]}
    code, _ = run_rank(tmp_path, {"name": "script", "script": script})
    assert code == 7
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "args": [str(tmp_path / "out.json"), "--n", "2"],
        "cwd": str(tmp_path),
        "helper": 3,
        "file": str(folder / "train.py"),
        "path": str(folder),
        "mxdist": [],
    }


def test_a_model_is_trained_without_any_store_too(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(16)})
    code, world = run_rank(tmp_path, small.job(epochs=1).to_document())
    assert code == 0, (world / "output").read_text()
    result = json.loads((world / "rank-0.result.json").read_text())
    assert (result["state"], result["steps"]) == ("done", 2)
    assert Path(result["model_dir"], "params.npz").is_file()
    assert json.loads((world / "progress.json").read_text())["steps"] == 2


def test_what_went_wrong_is_written_down(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(16)})
    (tmp_path / "broken.py").write_text("def network(params):\n    raise KeyError('depth')\n")
    code, world = run_rank(tmp_path, small.job(model={"recipe": str(tmp_path / "broken.py")}).to_document())
    assert code == 81
    result = json.loads((world / "rank-0.result.json").read_text())
    assert result == {
        "state": "failed",
        "error": {"kind": "user_error", "message": "KeyError: 'depth'", "retryable": False},
    }
    assert "broken.py" in (world / "output").read_text()


def test_a_rank_whose_parent_is_of_another_job_does_not_start(tmp_path: Path) -> None:
    small = jobs(tmp_path, {"train": images(16)})
    code, world = run_rank(tmp_path, small.job().to_document(), MXDIST_TOKEN="of-a-supervisor-that-died")
    assert code == 83
    assert not list(world.glob("*.result.json"))
