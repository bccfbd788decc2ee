"""The parts of the demo that can be tried without starting anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from envs import horovod, host
from envs.environments import Layout, control_environment
from follow import view as live_view
from follow.conf import demo_conf, params_of
from follow.progress import Follower, Stage, order_of, reason_of
from follow.summary import rows, table
from follow.view import Plain, stage_text
from mxdist.launch.client import job_key_for_airflow
from mxdist.spec import JobState, TrainingJob
from mxdist.store import JobRun, State, open_store
from stack.airflow_api import AirflowApi
from steps import StepFailed, duration_text, run
from support.places import REPOSITORY


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
    assert text == "epoch 1/4  step 30/100  loss 0.25  1234 samples/s  ETA 65 s"


def test_the_stage_says_when_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    stage = Stage("train", "up_for_retry", 9, 1, retry_at=datetime(2026, 3, 2, 7, 12, 3, tzinfo=UTC).timestamp())
    assert stage_text(stage) == "failed, will be tried again at 07:12:03"


class Api(AirflowApi):
    """An Airflow with a run of ours that is queued, and an earlier one."""

    def __init__(self, earlier: list[dict[str, Any]]) -> None:
        super().__init__("http://127.0.0.1:9", "", "")
        self._earlier = earlier
        self.of_mine: list[dict[str, Any]] = []

    def call(self, method: str, path: str, body: Any = None) -> Any:
        delay = {"__type": "TimeDelta", "days": 0, "seconds": 10, "microseconds": 0}
        names = {"stage": ["train"], "train": []}
        answers: dict[str, Any] = {
            "dags/a_dag/tasks": {
                "tasks": [
                    {"task_id": name, "downstream_task_ids": after, "retry_delay": delay}
                    for name, after in names.items()
                ]
            },
            "dags/a_dag/dagRuns/mine": {"state": "running" if self.of_mine else "queued"},
            "dags/a_dag/dagRuns/mine/taskInstances?limit=100": {"task_instances": self.of_mine},
            "dags/a_dag/dagRuns?state=running&limit=1": {"dag_runs": [{"dag_run_id": "old"}] if self._earlier else []},
            "dags/a_dag/dagRuns/old/taskInstances?limit=100": {"task_instances": self._earlier},
        }
        return answers[path]


def test_queued_run_says_which_run_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    done = {"task_id": "stage", "state": "success"}
    waits = {"task_id": "train", "state": "up_for_retry", "end_date": "2026-03-02T07:12:03Z", "try_number": 1}
    runs, view = open_store(str(tmp_path)), Plain()
    for _ in range(2):
        view.show(Follower(Api([done, waits]), runs, "a_dag", "mine").look())
    view.show(Follower(Api([done, {**waits, "state": "deferred"}]), runs, "a_dag", "mine").look())
    view.show(Follower(Api([]), runs, "a_dag", "mine").look())
    assert capsys.readouterr().out.splitlines() == [
        "  run queued (one run at a time: it waits for old, whose stage train failed and waits for its retry "
        "at 07:12:13)",
        "  run queued (one run at a time: it waits for old, whose stage train is at work)",
        "  run queued (one run at a time: an earlier one may go first)",
    ]


@pytest.mark.parametrize("columns", [80, 100, 130, 200])
def test_a_line_of_the_live_view_never_loses_loss_rate_and_eta(columns: int) -> None:
    metrics = {"loss": 0.12345, "validation_accuracy": 0.98765, "validation_loss": 0.23456}
    job = State(
        JobState.RUNNING, epoch=3, epochs=4, step=56, steps=112, metrics=metrics, samples_per_s=5432.1, eta_s=75.0
    )
    line = live_view._line(Stage("pretrain", "deferred", 83, 1, job=job), columns - 1)
    assert len(line) < columns
    assert re.search(r"pretrain .*epoch 3/4 .*loss 0.1235 .*5432 samples/s  ETA 75 s", line), line
    assert ("step 56/112" in line, "[####" in line) == (columns > 80, columns > 80)


def test_the_table_says_the_words_of_the_view() -> None:
    stages = [Stage("a", "success", 3, 1), Stage("b", "failed", 3, 1), Stage("c", "upstream_failed", 0, 0)]
    assert [row[1] for row in rows([*stages, Stage("d", None, 0, 0)], {})] == [
        "done",
        "failed",
        "not started",
        "not started",
    ]


def test_a_stage_lasts_from_the_submission_of_its_job(tmp_path: Path) -> None:
    """Airflow's start date of a task that waited is that of its last resumption."""
    runs = open_store(str(tmp_path))
    job = TrainingJob.parse({"name": "train", "script": {"path": "/train.py"}})
    attempt = JobRun(runs, job_key_for_airflow("a_dag", "mine", "train", -1)).claim(job, after=0)
    begun = attempt.claim.submitted_at

    def at(seconds: float) -> str:
        return datetime.fromtimestamp(begun + seconds, UTC).isoformat()

    waits = {"task_id": "train", "state": "deferred", "start_date": at(0.5), "try_number": 1}
    resumed = {**waits, "state": "success", "start_date": at(98), "end_date": at(100)}
    api = Api([])
    follower = Follower(api, runs, "a_dag", "mine")
    seconds = []
    for task in (waits, resumed):
        api.of_mine = [task]
        seconds.append(follower.look().stages[1].seconds)
    assert seconds[-1] == pytest.approx(100, abs=0.1)


def test_the_table_takes_the_duration_of_a_job_that_was_over_at_once() -> None:
    stage = Stage("train", "success", 2, 1)
    (row,) = rows([stage], {"train": {"duration_s": 99.4}})
    assert row[2] == "99 s"


DAG_FILE = REPOSITORY / "dags/mnist_retrain.py"


def test_parameters_of_the_demo_are_those_of_the_dag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"seed", "pretrain_epochs", "margin"} <= set(params_of(DAG_FILE))
    monkeypatch.delenv("MXDIST_DEMO_CONF", raising=False)
    assert demo_conf(DAG_FILE) == {}
    monkeypatch.setenv("MXDIST_DEMO_CONF", '{"seed": 1}')
    assert demo_conf(DAG_FILE) == {"seed": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{seed: 1}", "is no JSON"),
        ("[1]", "must be a JSON object"),
        ('{"pretrain_epoch": 1}', "no parameter 'pretrain_epoch'; did you mean 'pretrain_epochs'?"),
        (
            '{"seed": "x", "margin": 5, "strategy": "zzz", "transfer_rate": 0, "world_size": true}',
            'seed must be integer, not "x"; margin must be at most 1, not 5; strategy must be one of allreduce, '
            'parameter_server, not "zzz"; transfer_rate must be more than 0, not 0; '
            "world_size must be integer, not true",
        ),
        ('{"zzz": 1}', "no parameter 'zzz'; it has .*seed"),
    ],
)
def test_wrong_parameters_are_told_before_anything_starts(text: str, said: str) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts/demo.py")]
    environment = {**os.environ, "MXDIST_DEMO_CONF": text}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert re.search(said, done.stderr)


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


def test_mpi_has_a_wheel_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is linked to the library of one Open MPI; where there is none, the plain wheel is not disturbed."""
    requirements = tmp_path / "a.txt"
    requirements.write_text("mxnet==1.9.1\n")
    plain = horovod.cache_key(requirements)
    monkeypatch.setattr(horovod, "open_mpi", lambda: "4.1.4")
    older = horovod.cache_key(requirements, mpi=True)
    monkeypatch.setattr(horovod, "open_mpi", lambda: "5.0.1")
    assert len({plain, older, horovod.cache_key(requirements, mpi=True)}) == 3
    assert horovod.cache_key(requirements) == plain
    assert "HOROVOD_WITHOUT_MPI" in horovod.build_options(requirements)
    both = horovod.build_options(requirements, mpi=True)
    assert (both["HOROVOD_WITH_MPI"], both["HOROVOD_WITH_GLOO"]) == ("1", "1")
    assert "HOROVOD_WITHOUT_MPI" not in both


def test_a_missing_open_mpi_is_told_with_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert horovod.open_mpi() == ""
    assert host.report(host.missing_mpi()).endswith("sudo apt-get install -y libopenmpi-dev openmpi-bin")


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="exit code 3(.|\n)*the cause"):
        run(["sh", "-c", "echo the cause; exit 3"], log=tmp_path / "log")


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "7 s"), (99, "99 s"), (125, "2 min 05 s")])
def test_durations_read_easily(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
