"""What is made of Slurm's words: states, requeues, refusals. The commands are small scripts that say them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import LaunchError
from mxdist.launch import Life
from mxdist.launch.bundle import Bundle
from mxdist.launch.hosts import HostPlan
from mxdist.launch.slurm import OVER, SlurmLauncher
from mxdist.launch.slurm_commands import Here, Ran, There
from mxdist.launch.slurm_script import job_name
from mxdist.spec import parse_job
from mxdist.ssh import SshAccess, connections
from mxdist.store import Attempt, JobRun, open_store


@dataclass
class Said:
    """Commands whose answers a test has written down."""

    queue: list[str] = field(default_factory=list)
    sbatch: Ran = Ran(0, "17\n", "")
    squeue: int = 0
    where: str = "head"
    asked: list[tuple[list[str], str, dict[str, str]]] = field(default_factory=list)

    def kept(self) -> AbstractContextManager[object]:
        return nullcontext()

    def run(self, command: Sequence[str], *, text: str = "", environment: Mapping[str, str] | None = None) -> Ran:
        self.asked.append((list(command), text, dict(environment or {})))
        if command[0] == "sbatch":
            return self.sbatch
        if command[0] == "scancel":
            self.queue = []
        return Ran(self.squeue, "\n".join(["Welcome to the cluster!", *self.queue]), "slurm_load_jobs error: timed out")


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    job = parse_job({
        "name": "train",
        "script": {"path": str(tmp_path / "train.py")},
        "cluster": {"kind": "slurm", "nodes": 1, "slots": 1},
    })  # fmt: skip
    return JobRun(open_store(str(tmp_path / "runs")), "key").claim(job, after=0)


def claim(attempt: Attempt, number: int, *, at: float | None = None, nonce: str = "secrets-slurm-17-0.json") -> None:
    attempt.supervisors.append(number, {"nonce": nonce, "at": time.time() if at is None else at})


def launcher(said: Said) -> SlurmLauncher:
    return SlurmLauncher(python="/opt/python", commands=said)


def row(state: str, *, number: int = 17, incarnation: int = 1, reason: str = "None", ran: str = "1-00:00:00") -> str:
    return f"mxdist|{number}|{state}|{reason}|node1|{ran}|mxdist-key-1-{incarnation}"


@pytest.mark.parametrize(
    "state",
    [
        "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
        "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT", "RESIZING", "SIGNALING", "STAGE_OUT",
    ],
)  # fmt: skip
def test_who_has_a_place_in_the_queue_is_alive(attempt: Attempt, state: str) -> None:
    assert launcher(Said([row(state)])).life(attempt) is Life.ALIVE


@pytest.mark.parametrize("state", [*sorted(OVER), "CANCELLED by 1000", "CANCELLED+"])
def test_who_has_ended_is_dead_or_never_was(attempt: Attempt, state: str) -> None:
    assert launcher(Said([row(state)])).life(attempt) is Life.NEVER
    claim(attempt, 1)
    assert launcher(Said([row(state)])).life(attempt) is Life.DEAD
    assert launcher(Said()).life(attempt) is Life.DEAD


def test_a_run_that_was_lost_and_its_follower_are_alive(attempt: Attempt) -> None:
    claim(attempt, 1)
    assert launcher(Said([row("NODE_FAIL"), row("PENDING", number=18, incarnation=2)])).life(attempt) is Life.ALIVE


def test_a_controller_that_is_silent_says_nothing_of_the_job(attempt: Attempt) -> None:
    claim(attempt, 1)
    assert launcher(Said(squeue=1)).life(attempt) is Life.ALIVE
    with pytest.raises(LaunchError, match="squeue failed on head"):
        launcher(Said(squeue=1)).life(JobRun(attempt.job.runs, "other").claim(attempt.claim.parsed(), after=0))


def test_a_job_that_runs_and_is_not_heard_for_long_is_dead(attempt: Attempt) -> None:
    claim(attempt, 1, at=time.time() - 3600)
    assert launcher(Said([row("RUNNING")])).life(attempt) is Life.DEAD
    assert launcher(Said([row("PENDING")])).life(attempt) is Life.ALIVE  # requeued: it has nobody to be heard


@pytest.mark.parametrize(
    ("ran", "life"),
    [
        ("0:00", Life.ALIVE), ("14:59", Life.ALIVE), ("INVALID", Life.ALIVE), ("", Life.ALIVE), ("N/A", Life.ALIVE),
        ("15:01", Life.DEAD), ("1:00:00", Life.DEAD), ("2-00:00:00", Life.DEAD), ("  20:00 ", Life.DEAD),
    ],
)  # fmt: skip
def test_a_requeued_job_has_time_to_be_heard_when_it_runs_again(attempt: Attempt, ran: str, life: Life) -> None:
    """The last that was heard is of the run before, and the job may have waited for hours since."""
    claim(attempt, 1, at=time.time() - 7200)
    assert launcher(Said([row("RUNNING", ran=ran)])).life(attempt) is life


def test_who_waits_cannot_act_on_a_cancel(attempt: Attempt) -> None:
    attempt.request_cancel("user", "enough")
    assert launcher(Said([row("PENDING")])).life(attempt) is Life.NEVER
    assert launcher(Said([row("RUNNING")])).life(attempt) is Life.ALIVE
    claim(attempt, 1)
    assert launcher(Said([row("PENDING")])).life(attempt) is Life.DEAD


def test_a_job_in_the_queue_is_not_submitted_again(attempt: Attempt) -> None:
    said = Said([row("PENDING")])
    assert launcher(said).start(attempt, bundle(), incarnation=1, secrets={}) is False
    assert [asked[0][0] for asked in said.asked] == ["squeue"]


class Shared(Said):
    """One queue for jobs of several run stores; as the real one, it shows those with the names that are asked for."""

    def run(self, command: Sequence[str], *, text: str = "", environment: Mapping[str, str] | None = None) -> Ran:
        if command[0] != "squeue":
            return super().run(command, text=text, environment=environment)
        self.asked.append((list(command), text, {}))
        (names,) = [word.removeprefix("--name=").split(",") for word in command if word.startswith("--name=")]
        return Ran(0, "\n".join(line for line in self.queue if line.rpartition("|")[2] in names), "")


def test_the_same_key_in_another_run_store_is_another_job(attempt: Attempt, tmp_path: Path) -> None:
    other = JobRun(open_store(str(tmp_path / "others")), "key").claim(attempt.claim.parsed(), after=0)
    running = row("RUNNING").replace("mxdist-key-1-1", job_name("key", 1, 1, other.claim.token))
    said = Shared([running])
    assert launcher(said).life(other) is Life.ALIVE
    assert launcher(said).life(attempt) is Life.NEVER
    launcher(said).kill(attempt, grace_s=0)
    assert said.queue == [running]
    with pytest.raises(LaunchError, match="before its supervisor had started"):  # submitted, and the queue forgets it
        launcher(said).start(attempt, bundle(), incarnation=1, secrets={})
    assert "sbatch" in {asked[0][0] for asked in said.asked}


def test_two_clients_submit_the_same_incarnation_by_one_name(attempt: Attempt) -> None:
    names = []
    for found in (attempt, JobRun(attempt.job.runs, "key").claim(attempt.claim.parsed(), after=0)):
        said = Said()
        with pytest.raises(LaunchError, match="before its supervisor had started"):
            launcher(said).start(found, bundle(), incarnation=1, secrets={})
        names += [asked[2]["MXDIST_SLURM"] for asked in said.asked if asked[0][0] == "sbatch"]
    assert len(names) == 2
    assert len(set(names)) == 1


def test_a_place_that_is_claimed_is_not_asked_for_again(attempt: Attempt) -> None:
    claim(attempt, 1)
    said = Said()
    assert launcher(said).start(attempt, bundle(), incarnation=1, secrets={}) is False
    assert "sbatch" not in {asked[0][0] for asked in said.asked}


def test_secrets_travel_beside_the_script(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    monkeypatch.setattr(said, "queue", [])
    secrets = {"AWS_SECRET_ACCESS_KEY": "canary-1", "HOME_MADE": "canary-2", "MLFLOW_TRACKING_TOKEN": ""}
    with pytest.raises(LaunchError, match="before its supervisor had started"):
        launcher(said).start(attempt, bundle(), incarnation=1, secrets=secrets)
    (asked,) = [one for one in said.asked if one[0][0] == "sbatch"]
    command, script, environment = asked
    assert command == ["sbatch", "--parsable"]
    assert "canary" not in script
    assert "--export=MXDIST_SLURM,AWS_SECRET_ACCESS_KEY\n" in script
    assert environment == {
        "AWS_SECRET_ACCESS_KEY": "canary-1",
        "MXDIST_SLURM": job_name("key", 1, 1, attempt.claim.token),
    }


_POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    ("said", "hint", "retryable"),
    [
        ("invalid partition specified: x\nBatch job submission failed: Invalid partition name", "partition", False),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "account", False),
        ("Batch job submission failed: Invalid qos specification", "qos", False),
        ("Batch job submission failed: Invalid feature specification", "constraint", False),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "time_limit_s",
         False),
        ("Batch job submission failed: Invalid generic resource (gres) specification", "gres, gpus_per_node", False),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", "scontrol ping", True),
        ("Batch job submission failed: Socket timed out on send/recv operation", "scontrol ping", True),
        ("AssocMaxSubmitJobLimit\nsbatch: error: " + _POLICY, "as many jobs in the queue", True),
        ("QOSMaxSubmitJobPerUserLimit\nsbatch: error: " + _POLICY, "as many jobs in the queue", True),
        ("QOSMaxWallDurationPerJobLimit\nsbatch: error: " + _POLICY, "time_limit_s", False),
    ],
)  # fmt: skip
def test_refusals_name_the_field(attempt: Attempt, said: str, hint: str, retryable: bool) -> None:
    commands = Said(sbatch=Ran(1, "", f"sbatch: {said}\n"))
    with pytest.raises(LaunchError, match="sbatch on head refused the job") as raised:
        launcher(commands).start(attempt, bundle(), incarnation=1, secrets={})
    assert hint in raised.value.hint
    assert raised.value.retryable is retryable


def test_all_incarnations_are_cancelled_together(attempt: Attempt) -> None:
    claim(attempt, 1)
    said = Said([row("RUNNING"), row("PENDING", number=18, incarnation=2)])
    launcher(said).kill(attempt, grace_s=0)
    cancels = [asked[0] for asked in said.asked if asked[0][0] == "scancel"]
    assert cancels == [["scancel", "--signal=KILL", "--full", "17", "18"]] or cancels[-1] == ["scancel", "17", "18"]


def test_variables_that_would_override_the_script_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    out = Here().run(["env"], environment={"MXDIST_SLURM": "n"}).out
    assert "SBATCH_PARTITION" not in out
    assert {"SLURM_CONF=/etc/slurm.conf", "MXDIST_SLURM=n"} <= set(out.split())


def test_input_of_a_command_on_a_head_node_runs_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(ssh: object, host: HostPlan, command: Sequence[str], *, stdin: bytes, timeout_s: float) -> Any:
        done = subprocess.run(["sh", "-s"], input=stdin, capture_output=True, timeout=timeout_s, check=True)
        return connections.Done(done.returncode, done.stdout, done.stderr)

    monkeypatch.setattr(connections.Ssh, "run", run)
    text = "MXDIST_INPUT_END\necho $((6 * 7)) `id`\n'"
    assert There(HostPlan("head", 1), SshAccess()).run(["cat"], text=text).out == f"{text}\n"


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_profile_of_a_head_node_does_not_override_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    (tmp_path / ".profile").write_text(
        "export SBATCH_PARTITION=other SLURM_CLUSTERS=c2 SQUEUE_STATES=PENDING SCANCEL_STATE=RUNNING SLURM_JWT=j\n"
        "export SLURM_CONF=/etc/s.conf MODULES=m SBATCH_COMMENT='a b\nSLURM_x y=z'\n"
        "export SBATCH_QOS=low; readonly SBATCH_QOS\n"
    )

    def run(ssh: object, host: HostPlan, command: Sequence[str], *, stdin: bytes, timeout_s: float) -> Any:
        assert command[0] == "sh"
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        words = [shell, *command[1:]]
        done = subprocess.run(words, input=stdin, env=environment, capture_output=True, timeout=timeout_s, check=True)
        return connections.Done(done.returncode, done.stdout, done.stderr)

    monkeypatch.setattr(connections.Ssh, "run", run)
    ran = There(HostPlan("head", 1), SshAccess()).run(["env"], environment={"MXDIST_SLURM": "n", "SBATCH_MINE": "m"})
    found = {line for line in ran.out.splitlines() if line.startswith(("S", "MXDIST", "MODULES"))}
    kept = {"SLURM_CONF=/etc/s.conf", "SLURM_JWT=j", "MODULES=m", "MXDIST_SLURM=n", "SBATCH_MINE=m", "SBATCH_QOS=low"}
    assert {line for line in found if not line.startswith("SHLVL")} == kept
    assert ran.err == ""


def test_without_slurm_here_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch on this host.*slurm-client"):
        Here().run(["sbatch"])


def test_the_plan_shows_the_script_without_anything_secret(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-1")
    (sent,) = launcher(Said()).sends(attempt.claim.parsed(), "key", runs_uri="s3://bucket/runs")
    assert sent.title == "sbatch script, on head"
    assert "#SBATCH --job-name=mxdist-key-<attempt>-<incarnation>-xxxxxxxx\n" in sent.text
    assert "canary" not in sent.text


def bundle() -> Bundle:
    return Bundle({"mxdist/__init__.py": b""})
