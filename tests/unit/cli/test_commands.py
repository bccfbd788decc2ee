"""The commands as a user runs them: real processes, real jobs, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import mxdist
from mxdist import processes
from mxdist.spec import JobState
from mxdist.store import Attempt, JobRun, Result, open_store
from support.places import node_python

SLEEP = "import time\nprint('started', flush=True)\ntime.sleep(100_000)\n"


@dataclass
class Shell:
    """A terminal in a folder with a job file."""

    folder: Path

    def write(self, script: str, **job: object) -> None:
        """Write a script and the file of a job that runs it."""
        (self.folder / "train.py").write_text(script)
        limits = {"grace_s": 1, "max_restarts": 0}
        document = {"name": "x", "script": {"path": "train.py"}, "limits": limits, **job}
        (self.folder / "job.yaml").write_text(json.dumps(document))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``mxdist``."""
        environment = {
            **os.environ, "PYTHONPATH": str(Path(mxdist.__file__).parents[1]), "MXDIST_NODE_PYTHON": str(node_python()),
            "MXDIST_RUNS_URI": str(self.folder / "runs"), "MXDIST_WORKDIR": str(self.folder / "jobs"),
        }  # fmt: skip
        command = [sys.executable, "-m", "mxdist.cli", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else ignored in a background run
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run ``mxdist``; return exit code, output and errors."""
        process = self.start(*arguments)
        out, err = process.communicate()
        return process.returncode, out, err

    def attempts(self) -> list[Attempt]:
        """Return every attempt of every job."""
        store = open_store(str(self.folder / "runs"))
        keys = {entry.key.split("/")[1] for entry in store.list("_jobs/")}
        return [attempt for key in keys if (attempt := JobRun(store, key).latest()) is not None]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    left = [process for attempt in shell.attempts() for process in processes.find(attempt.claim.token)]
    for attempt in shell.attempts():
        processes.terminate(attempt.claim.token, grace_s=0)
    assert left == []


def wait_until(condition: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + 120
    while not (value := condition()):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.05)
    return value


def gone(attempt: Attempt) -> Result:
    """Wait until the attempt has ended and its supervisor is gone."""
    result = wait_until(attempt.result)
    wait_until(lambda: not processes.find(attempt.claim.token))
    assert isinstance(result, Result)
    return result


def test_run_streams_the_log_and_succeeds(shell: Shell) -> None:
    shell.write("print('hello')")
    code, out, err = shell.run("run", "job.yaml")

    assert code == 0
    assert "[0] hello\n" in out
    assert "state       SUCCEEDED" in err
    assert shell.attempts()[0].handed_over(), "the next run trains again"
    gone(shell.attempts()[0])


@pytest.mark.parametrize(
    ("script", "limits", "code", "told"),
    [
        ("raise SystemExit(3)", {}, 8, "rank 0 exited with code 3"),
        (SLEEP, {"deadline_s": 2}, 9, "the attempt's time was up"),
    ],
    ids=["failed", "deadline"],
)
def test_exit_code_tells_how_it_ended(
    shell: Shell, script: str, limits: dict[str, float], code: int, told: str
) -> None:
    shell.write(script, limits={"grace_s": 0, "max_restarts": 0, **limits})
    found, _, err = shell.run("run", "job.yaml")

    assert found == code
    assert told in err
    gone(shell.attempts()[0])


def test_control_c_cancels(shell: Shell) -> None:
    again = "import time\nprint('started', flush=True)\ntime.sleep(1)\nprint('and goes on', flush=True)\n"
    shell.write(again + "time.sleep(100_000)")
    process = shell.start("run", "job.yaml")
    assert process.stdout is not None
    assert process.stdout.readline() == "[0] started\n"
    assert process.stdout.readline() == "[0] and goes on\n"  # so it has noted that it printed the first line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()

    assert process.returncode == 130
    assert "started" not in out, "what was printed is not printed again"
    assert "CANCELLED" in err
    assert "Traceback" not in err
    assert processes.find(shell.attempts()[0].claim.token) == []


def test_job_lives_on_when_its_run_is_killed_and_is_found_again(shell: Shell) -> None:
    shell.write("import os, time\nprint('started', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)")
    with shell.start("run", "job.yaml") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0] started\n"
        process.kill()
    again = shell.start("run", "job.yaml")
    assert again.stdout is not None
    assert again.stdout.readline() == "[0] started\n"
    (shell.folder / "go").touch()
    _, err = again.communicate()

    assert again.returncode == 0
    assert "attempt 1 reattached" in err
    gone(shell.attempts()[0])


def test_submit_status_logs_cancel(shell: Shell) -> None:
    shell.write(SLEEP)
    code, out, _ = shell.run("submit", "job.yaml")
    key = out.split()[0]
    assert (code, out) == (0, f"{key} attempt 1: started\n")
    wait_until(lambda: "started" in shell.run("logs", key)[1])

    wait_until(lambda: shell.run("status", "job.yaml")[1].startswith(f"{key} attempt 1: running"))
    assert f"{key}  1        RUNNING" in shell.run("status")[1]
    told = json.loads(shell.run("status", key, "--json")[1])
    assert (told["claim"]["job_key"], told["result"]) == (key, None)
    code, out, _ = shell.run("cancel", key, "--reason", "enough")
    assert code == 0
    assert "enough" in out
    assert json.loads(shell.run("status", "--json")[1]) == [{"job_key": key, "attempt": 1, "state": "CANCELLED"}]


def test_job_file_names_the_same_job_under_the_same_options(shell: Shell) -> None:
    shell.write("print('done')")
    options = ("job.yaml", "--endpoint-url", "http://127.0.0.1:9")  # of S3; the run store here is a folder
    assert shell.run("run", *options)[0] == 0

    for command in ("status", "logs"):
        code, out, err = shell.run(command, *options)
        assert (code, err) == (0, "")
        assert out
    gone(shell.attempts()[0])


def test_followed_log_ends_with_the_job(shell: Shell) -> None:
    shell.write("import time\nfor n in range(5): print(n, flush=True); time.sleep(0.3)")
    key = shell.run("submit", "job.yaml")[1].split()[0]

    assert shell.run("logs", "--follow", key)[1].startswith("".join(f"[0] {n}\n" for n in range(5)))
    gone(shell.attempts()[0])


def test_reconcile_acts_on_cancel_intents_of_dead_supervisors(shell: Shell) -> None:
    shell.write(SLEEP)
    shell.run("submit", "job.yaml")
    attempt = shell.attempts()[0]
    wait_until(lambda: attempt.read_state().ranks)
    pid = next(document["pid"] for _, document in attempt.supervisors.read())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: processes.start_time(pid) is None)
    attempt.request_cancel("airflow", "the DAG run was deleted")
    code, out, _ = shell.run("reconcile")

    assert code == 0
    assert "ended as CANCELLED" in out
    assert gone(attempt).state is JobState.CANCELLED
    assert shell.run("reconcile") == (0, "", "")


def test_plan_starts_nothing(shell: Shell) -> None:
    shell.write(SLEEP, parallelism={"world_size": 2})
    code, out, _ = shell.run("plan", "job.yaml", "--set", "parallelism.world_size=3")

    assert code == 0
    assert "job         x (training), 3 ranks" in out
    assert not (shell.folder / "runs").exists()
    assert json.loads(shell.run("plan", "job.yaml", "--json")[1])["ranks"][1]["rank"] == 1


def test_schema_is_a_json_schema(shell: Shell) -> None:
    code, out, _ = shell.run("schema")

    assert code == 0
    assert "TrainingJob" in json.loads(out)["$defs"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["run", "nothing.yaml"], 2, "nothing.yaml has 1 problem"),
        (["run", "job.yaml", "--set", "epoch=2"], 2, "did you mean 'epochs'"),
        (["submit", "job.yaml", "--key", "../x"], 2, "The job key"),
        (["submit", "job.yaml", "--key", ""], 2, "The job key"),
        (["plan", "job.yaml", "--key", "../x"], 2, "The job key"),
        (["plan", "job.yaml", "--set", "script.path=none.py"], 2, "script.path: there is no file"),
        (["plan", "recipe.yaml"], 2, "model.recipe: there is no file"),
        (["status", "nobody"], 4, "there is no job 'nobody'"),
        (["status", "--runs", "ftp://x"], 2, "must be s3://bucket/prefix"),
        (["fly"], 2, "invalid choice"),
        ([], 2, "required"),
    ],
)
def test_mistakes_are_told_without_a_traceback(shell: Shell, arguments: list[str], code: int, told: str) -> None:
    shell.write("pass")
    dataset = {"manifest_uri": "s3://d/m/manifests/1.json", "version": "0" * 64}
    recipe = {"name": "x", "model": {"recipe": "none.py"}, "dataset": dataset}
    (shell.folder / "recipe.yaml").write_text(json.dumps(recipe))
    found, _, err = shell.run(*arguments)

    assert found == code
    assert told in err
    assert "Traceback" not in err


def test_command_line_needs_no_mlflow_and_no_airflow() -> None:
    loaded = "{'mlflow', 'airflow', 'mxnet', 'boto3', 'yaml'} & set(sys.modules)"
    check = f"import sys, mxdist.cli.commands; sys.exit(bool({loaded}))"
    environment = {**os.environ, "PYTHONPATH": str(Path(mxdist.__file__).parents[1])}

    assert subprocess.run([sys.executable, "-c", check], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("module", ["argparse", "pydantic", "yaml"])
def test_control_c_while_modules_are_loaded(shell: Shell, tmp_path: Path, module: str) -> None:
    """A module that is loaded early, late or for one command presses Ctrl-C in the middle of its import."""
    shell.write("pass")
    early = tmp_path / "early"
    early.mkdir()
    (early / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    plugins = str(Path(mxdist.__file__).parents[1])
    for start in (["-m", "mxdist.cli"], ["-c", "import sys; from mxdist.cli import main; sys.exit(main())"]):
        done = subprocess.run(
            [sys.executable, *start, "plan", "job.yaml"], env={**os.environ, "PYTHONPATH": f"{early}:{plugins}"},
            cwd=tmp_path, capture_output=True, text=True, check=False,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "mxdist: interrupted\n")


@pytest.mark.parametrize("command", ["submit", "run"])
def test_dataset_that_is_not_there_is_told_before_anything_is_claimed(shell: Shell, command: str) -> None:
    version = "0" * 64
    shell.write("", dataset={"manifest_uri": f"{shell.folder}/data/set/manifests/{version}.json", "version": version})
    code, out, err = shell.run(command, "job.yaml")
    assert (code, out) == (5, "")
    assert f"there is no dataset at {shell.folder}/data/set/manifests/{version}.json" in err
    assert shell.attempts() == []
