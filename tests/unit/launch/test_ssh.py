"""What the ssh launcher decides without reaching any host."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import LaunchError, SpecError
from mxdist.launch import Life, collect
from mxdist.launch.hosts import HostPlan
from mxdist.launch.ssh import SshLauncher, _answer, _left_to_guards
from mxdist.spec import JobState, TrainingJob, parse_job
from mxdist.ssh import SshAccess
from mxdist.ssh.connections import Done
from mxdist.store import Attempt, JobRun, Result, open_store
from stack.ports import free_ports

NODE = HostPlan("node1", 1)


def job(folder: Path, **cluster: Any) -> TrainingJob:
    (folder / "train.py").write_text("print('hello')\n")
    hosts = ["node1:1", "root@node2:1 port=2222"]
    found = parse_job({
        "name": "x", "script": {"path": str(folder / "train.py")}, "parallelism": {"world_size": 2},
        "cluster": {"kind": "ssh", "hosts": hosts, "python": "/opt/node/bin/python", **cluster},
    })  # fmt: skip
    assert isinstance(found, TrainingJob)
    return found


def claimed(folder: Path, wanted: TrainingJob) -> Attempt:
    return JobRun(open_store(str(folder / "runs")), "job").claim(wanted, after=0, code_digest=collect(wanted).digest)


def refused(port: int) -> dict[str, Any]:
    """Return a cluster whose only host refuses at once."""
    ssh = {"connect_attempts": 1, "known_hosts": ["x ssh-ed25519 AAAA"]}
    return {"hosts": [f"127.0.0.1:1 port={port}", f"127.0.0.2:1 port={port}"], "ssh": ssh}


@pytest.fixture
def unreachable(tmp_path: Path) -> Attempt:
    (port,) = free_ports(1)
    return claimed(tmp_path, job(tmp_path, **refused(port)))


def supervised(attempt: Attempt, *, at: float) -> None:
    attempt.supervisors.append(
        1, {"pid": 7, "start_time": 7, "host": "node1", "host_identity": "x", "at": at, "nonce": "n"}
    )


def test_a_plan_needs_the_hosts_python_and_looks_for_it_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MXDIST_NODE_PYTHON", raising=False)
    plan = SshLauncher().plan(job(tmp_path), "job", runs_uri="s3://b/runs")
    assert plan.python == "/opt/node/bin/python"
    assert [host.name for host in plan.hosts] == ["node1", "node2"]
    with pytest.raises(LaunchError, match=r"cluster\.python"):
        SshLauncher().plan(job(tmp_path, python=None), "job", runs_uri="s3://b/runs")


def test_what_is_sent_names_every_host_and_no_secret(tmp_path: Path) -> None:
    launcher = SshLauncher(SshAccess("trainer", key="canary-key", passphrase="canary-word"))
    sent = launcher.sends(job(tmp_path), "job", runs_uri="s3://b/runs")
    titles = [one.title for one in sent]
    assert titles[0] == "command on trainer@node1: the supervisor"
    assert titles[1] == "command on root@node2 port 2222: an agent, by the supervisor"
    assert "canary" not in str(sent)


def test_a_shared_disk_needs_a_folder_on_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cluster\.workdir"):
        SshLauncher().plan(job(tmp_path, code="shared"), "job", runs_uri="/runs")


def test_an_answer_is_found_among_a_login_shells_chatter() -> None:
    said = b'Welcome to node1!\n{"motd": 1}\n[1]\n' + json.dumps({"mxdist": "answer", "alive": True}).encode() + b"\n"
    assert _answer(NODE, Done(0, said, b""))["alive"] is True


def test_an_error_of_the_host_names_it_and_keeps_its_hint() -> None:
    said = json.dumps(
        {"mxdist": "error", "message": "the disk is full", "hint": "Free it.", "retryable": False}
    ).encode()
    with pytest.raises(LaunchError, match=r"node1: the disk is full. Free it.") as caught:
        _answer(NODE, Done(1, said, b""))
    assert not caught.value.retryable


def test_a_host_without_the_python_says_so() -> None:
    with pytest.raises(LaunchError, match=r"node1 does not answer \(exit code 127\): sh: no such file"):
        _answer(NODE, Done(127, b"", b"sh: no such file\n"))


def test_a_start_that_reaches_nobody_claims_nothing(unreachable: Attempt) -> None:
    launcher = SshLauncher()
    bundle = collect(unreachable.claim.parsed())
    with pytest.raises(LaunchError, match=r"cannot reach 127\.0\.0\.1: nothing listens"):
        launcher.start(unreachable, bundle, incarnation=1, secrets={})
    assert launcher.life(unreachable) is Life.NEVER


def test_a_fresh_heartbeat_is_believed_and_a_stale_one_is_asked_about(unreachable: Attempt) -> None:
    launcher = SshLauncher()
    supervised(unreachable, at=time.time())
    assert launcher.life(unreachable) is Life.ALIVE  # nobody was asked: nobody could have answered
    state = unreachable.read_state()
    unreachable.write_state(replace(state, heartbeat=time.time() - 1000))
    assert launcher.life(unreachable) is Life.ALIVE
    other = JobRun(unreachable.job.runs, "other").claim(unreachable.claim.parsed(), after=0, code_digest="0" * 64)
    supervised(other, at=time.time() - 1000)
    assert launcher.life(other) is Life.DEAD


def test_a_kill_that_reaches_nobody_names_all_hosts_and_their_guards(unreachable: Attempt) -> None:
    supervised(unreachable, at=time.time())
    with pytest.raises(LaunchError, match="guard") as caught:
        SshLauncher().kill(unreachable, grace_s=0)
    _, *lines = caught.value.message.splitlines()
    assert [line.partition(" at ")[0] for line in lines] == [
        "  127.0.0.1: nothing listens",
        "  127.0.0.2: nothing listens",
    ]
    assert caught.value.retryable


def test_hosts_out_of_reach_keep_no_new_attempt_waiting_once_their_guards_have_acted(unreachable: Attempt) -> None:
    supervised(unreachable, at=time.time())
    limit_s = unreachable.claim.parsed().limits.link_timeout_s
    assert not _left_to_guards(unreachable, limit_s)
    unreachable.finish(Result(JobState.FAILED, time.time() - 1000))
    SshLauncher().kill(unreachable, grace_s=0)


def test_a_first_host_that_is_gone_for_good_does_not_block_the_job_for_ever(unreachable: Attempt) -> None:
    supervised(unreachable, at=time.time() - 4000)
    with pytest.raises(LaunchError, match="guard"):
        SshLauncher().kill(unreachable, grace_s=0)  # nobody wants it to end
    unreachable.request_cancel("user", "enough")
    SshLauncher().kill(unreachable, grace_s=0)


def test_a_host_out_of_reach_that_was_heard_of_is_waited_for(unreachable: Attempt) -> None:
    supervised(unreachable, at=time.time() - 4000)
    unreachable.request_cancel("user", "enough")
    unreachable.write_state(replace(unreachable.read_state(), heartbeat=time.time() - 600))
    with pytest.raises(LaunchError, match="guard"):
        SshLauncher().kill(unreachable, grace_s=0)


def test_what_never_started_needs_no_reaching(unreachable: Attempt) -> None:
    SshLauncher().kill(unreachable, grace_s=0)
