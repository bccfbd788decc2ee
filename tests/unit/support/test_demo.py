"""The parts of the demo that can be tried without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs import horovod, host
from envs.environments import Layout, control_environment
from follow.progress import Stage, order_of, reason_of
from follow.summary import rows, table
from follow.view import stage_text
from mxdist.store import State
from steps import StepFailed, duration_text, run


def test_stages_stand_in_the_order_of_their_work() -> None:
    tasks = [
        {"task_id": "promote", "downstream_task_ids": []},
        {"task_id": "train", "downstream_task_ids": ["promote"]},
        {"task_id": "stage", "downstream_task_ids": ["train", "promote"]},
    ]
    assert order_of(tasks) == ["stage", "train", "promote"]


def test_the_reason_is_the_last_error_of_the_log() -> None:
    events = [
        {"level": "error", "event": "an earlier one"},
        {"level": "error", "event": "Failed", "error_detail": [{"exc_type": "DataError", "exc_value": "x is torn"}]},
        {"level": "info", "event": "bye"},
    ]
    assert reason_of(events) == "x is torn"


def test_a_running_stage_says_epoch_loss_speed_and_time_left() -> None:
    job = State(epoch=1, epochs=4, step=30, steps=100, samples_per_s=1234.4, eta_s=65, metrics={"loss": 0.25})
    text = stage_text(Stage("train", "deferred", 9, 1, job))
    assert text == "epoch 2/4  step 30/100  loss 0.25  1234 samples/s  ETA 65 s"


def test_the_table_names_model_and_champion() -> None:
    result = {"decision": "kept champion", "reason": "0.9 < 0.95", "model": "digits", "version": "2", "champion": "1"}
    text = table(rows([Stage("promote", "success", 3, 1)], {"promote": result}))
    assert "kept champion: 0.9 < 0.95" in text
    assert "digits v2" in text
    assert "champion = v1" in text
    assert "samples/s" not in text  # an empty column


def test_everything_missing_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(host, "find_python", lambda: None)
    monkeypatch.setattr(host, "_has_library", lambda name: False)
    text = host.report(host.missing(tmp_path, compiler=True, uv=None))
    packages = text.splitlines()[-1].split("install -y ")[1].split()
    assert {"g++", "make", "python3.11", "python3.11-venv", "libgomp1", "libquadmath0"} <= set(packages)


def test_lint_settings_do_not_make_an_environment_anew(tmp_path: Path) -> None:
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text("")
    project = tmp_path / "pyproject.toml"
    project.write_text("[project]\nname = 'a'\n\n[tool.ruff]\nline-length = 100\n")
    before = control_environment(Layout(tmp_path))
    project.write_text("[project]\nname = 'a'\n\n[tool.ruff]\nline-length = 120\n")
    assert control_environment(Layout(tmp_path)) == before
    project.write_text("[project]\nname = 'b'\n\n[tool.ruff]\nline-length = 120\n")
    assert control_environment(Layout(tmp_path)) != before


def test_the_wheel_depends_on_mxnet(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("mxnet==1.9.1\nnumpy==1.23.5\n")
    second.write_text("mxnet-cu112==1.9.1\n")
    assert horovod.cache_key(first) != horovod.cache_key(second)


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="exit code 3(.|\n)*the cause"):
        run(["sh", "-c", "echo the cause; exit 3"], log=tmp_path / "log")


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "7 s"), (99, "99 s"), (125, "2 min 05 s")])
def test_durations_read_easily(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
