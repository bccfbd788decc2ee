"""What is handed to Slurm: golden scripts, and values that never get into one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import SpecError
from mxdist.launch.hosts import place
from mxdist.launch.slurm_script import AGENT, batch_script, directives, job_name, payload, time_limit
from mxdist.spec import TrainingJob, parse_job

GOLDEN = Path(__file__).parent / "golden"
PYTHON = "/opt/mxdist/bin/python"


def job(nodes: int = 2, slots: int = 1, **slurm: Any) -> TrainingJob:
    found = parse_job({
        "name": "train",
        "script": {"path": "train.py"},
        "cluster": {"kind": "slurm", "nodes": nodes, "slots": slots, "slurm": slurm},
        "parallelism": {"world_size": nodes * slots},
    })  # fmt: skip
    assert isinstance(found, TrainingJob)
    return found


def script(job: TrainingJob, *, names: tuple[str, ...] = ()) -> str:
    name = job_name("train-1a2b", 1, 1, "abc")
    frames = payload("first = 1\n", {"attempt": 1}, "boot = 1\n")
    return batch_script(job, place(job), name=name, names=names, python=PYTHON, frames=frames)


def options(job: TrainingJob) -> list[str]:
    return directives(job, place(job), name="n", names=())


EVERYTHING = {
    "partition": "gpu", "account": "lab", "qos": "high", "gres": "gpu:a100:2", "gpus_per_node": "a100:2",
    "exclusive": True, "constraint": "[rack1|rack2]&ib", "reservation": "spring", "memory": "64G", "cpus_per_slot": 4,
    "time_limit_s": 93_784, "requeue": False, "output": "/shared/logs/%x-%j.out",
    "setup": ["module load cuda/11.2", "export NCCL_DEBUG=WARN"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("golden", "made"),
    [
        ("slurm_two_nodes", lambda: script(job())),
        (
            "slurm_everything",
            lambda: script(job(3, 2, **EVERYTHING), names=("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")),
        ),
    ],
)
def test_scripts_are_as_they_were(golden: str, made: Any) -> None:
    path = GOLDEN / f"{golden}.sh"
    if os.environ.get("MXDIST_GOLDEN"):
        path.write_text(made())
    assert made() == path.read_text()


def test_the_name_tells_attempts_of_one_key_apart() -> None:
    """The digest of "abc" is the first example of FIPS 180-2."""
    assert job_name("key", 1, 2, "abc") == "mxdist-key-1-2-ba7816bf"
    assert job_name("key", 1, 2, "abd") != job_name("key", 1, 2, "abc")
    assert len(job_name("key", 1, 2, None)) == len(job_name("key", 1, 2, "abc"))


def test_shell_reads_the_script_and_python_the_frames(tmp_path: Path) -> None:
    """A frame may hold anything: quotes, dollars, a line that looks like an end."""
    odd = "text = '''$HOME `id` \\ \" é MXDIST_EN\nMXDIST_END2 $(id)'''\n"
    show = (
        "import sys\n"
        "f = open(0, 'rb', 0, closefd=False)\n"
        "def frame():\n"
        "    n = int(f.readline()); b = b''\n"
        "    while len(b) < n: b += f.read(n - len(b))\n"
        "    return b.decode()\n"
        "import json; print(json.dumps([json.loads(frame()), frame()]))\n"
    )
    frames = payload(show, {"odd": odd}, odd)
    text = batch_script(job(), place(job()), name="n", names=(), python="python3", frames=frames)
    path = tmp_path / "script.sh"
    path.write_text(text)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert json.loads(done.stdout.splitlines()[-1]) == [{"odd": odd}, odd]


@pytest.mark.parametrize(
    "value",
    [
        "a b", "a\nb", "a;b", "$(id)", "`id`", "a'b", 'a"b', "a\\b", "a|b", "a&b", "a>b", "a<b", "a#b", "a\0b",
        "a\tb", "x" * 256,
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "field", ["partition", "account", "qos", "gres", "gpus_per_node", "reservation", "memory", "output"]
)
def test_metacharacters_are_refused(field: str, value: str) -> None:
    with pytest.raises(SpecError, match=rf"cluster\.slurm\.{field}"):
        job(**{field: value})


@pytest.mark.parametrize("value", ["a b", "a;b", "$(id)", "`id`", "a'b", 'a"b', "a\\b", "a>b", "a\nb", "a#b"])
def test_a_constraint_takes_an_expression_and_no_more(value: str) -> None:
    with pytest.raises(SpecError, match=r"cluster\.slurm\.constraint"):
        job(constraint=value)


@pytest.mark.parametrize("value", ["intel", "intel&gpu", "[rack1|rack2]", "rack1*2&ib", "(a|b)&c", "zen3,ib"])
def test_constraints_that_slurm_knows_go_through(value: str) -> None:
    assert f"--constraint={value}" in options(job(constraint=value))


@pytest.mark.parametrize("line", ["#SBATCH --uid=0", "  #SBATCH -p x"])
def test_setup_holds_no_directives(line: str) -> None:
    with pytest.raises(SpecError, match=r"cluster\.slurm\.setup"):
        job(setup=["module load a", line])


def test_setup_is_lines() -> None:
    assert job(setup="module load a\nmodule load b").cluster.slurm.setup == ("module load a", "module load b")


def test_cores_are_asked_for_each_rank_unless_the_node_is_ours() -> None:
    assert "--cpus-per-task=2" in options(job(2, 2))
    assert "--cpus-per-task=8" in options(job(2, 2, cpus_per_slot=4))
    assert not [word for word in options(job(2, 2, exclusive=True)) if "cpus" in word]


def test_nothing_of_the_environment_goes_along_but_what_is_named() -> None:
    (exported,) = [word for word in options(job()) if word.startswith("--export")]
    assert exported == "--export=MXDIST_SLURM"


def test_agents_see_all_cores_and_do_not_queue_for_ever() -> None:
    assert {"--overlap", "--cpu-bind=none", "--immediate=30"} <= set(AGENT)
    assert not [word for word in AGENT if word.startswith("--exact")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(60, "0-00:01:00"), (3_599, "0-00:59:59"), (86_400, "1-00:00:00"), (93_784, "1-02:03:04")],
)
def test_times(seconds: int, text: str) -> None:
    assert time_limit(seconds) == text
