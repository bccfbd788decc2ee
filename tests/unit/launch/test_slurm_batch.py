"""What the batch step adds to the document, which supervisor it becomes, and whether Slurm will start it again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mxdist.runtime.arrival import claim_place, next_incarnation
from mxdist.runtime.slurm_batch import complete
from mxdist.runtime.slurm_job import SlurmJob, slurm_job
from mxdist.spec import parse_job
from mxdist.store import Attempt, JobRun, open_store


def environment(**more: str) -> dict[str, str]:
    return {
        "PATH": "/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node2", "SLURM_EXPORT_ENV": "AWS_ACCESS_KEY_ID",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "canary", **more,
    }  # fmt: skip


def document(**more: Any) -> dict[str, Any]:
    return {"secret_names": ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "environment": {"MXNET_X": "1"}, **more}


def test_the_document_gets_what_the_allocation_says() -> None:
    given = environment()
    found = complete(document(), given, ["node2", "node3"])
    assert found["secrets"] == {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "canary"}
    assert (found["hosts"], found["here"]) == (["node2", "node3"], "node2")
    assert (found["nonce"], found["again"]) == ("slurm-7-0", "secrets-slurm-7-")
    assert found["environment"] == {"MXNET_X": "1", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node2"}
    assert set(given) == {"PATH", "SLURM_JOB_ID", "SLURMD_NODENAME"}


def test_every_run_of_a_job_has_a_nonce_of_its_own() -> None:
    found = complete(document(), environment(SLURM_RESTART_COUNT="2"), ["node2"])
    assert (found["nonce"], found["again"]) == ("slurm-7-2", "secrets-slurm-7-")


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    job = parse_job({"name": "train", "script": {"path": str(tmp_path / "train.py")}})
    return JobRun(open_store(str(tmp_path / "runs")), "key").claim(job, after=0)


AGAIN = "secrets-slurm-7-"


def test_a_first_run_takes_the_place_that_it_was_made_for(attempt: Attempt) -> None:
    assert next_incarnation(attempt, 1, AGAIN) == 1
    claim_place(attempt, 1, "secrets-other.json")
    assert next_incarnation(attempt, 2, AGAIN) == 2


def test_a_requeued_run_is_the_next_supervisor(attempt: Attempt) -> None:
    for number in (1, 2, 3):
        assert next_incarnation(attempt, 1, AGAIN) == number
        claim_place(attempt, number, f"secrets-slurm-7-{number - 1}.json")


@pytest.mark.parametrize("holder", ["secrets-slurm-8-0.json", "secrets-slurm-70-0.json", "secrets-1f2e.json"])
def test_a_run_that_comes_too_late_finds_its_place_taken(attempt: Attempt, holder: str) -> None:
    claim_place(attempt, 1, "secrets-slurm-7-0.json")
    claim_place(attempt, 2, holder)
    assert next_incarnation(attempt, 1, AGAIN) == 1
    assert not claim_place(attempt, next_incarnation(attempt, 1, AGAIN), "secrets-slurm-7-1.json")


SHOW = "JobId=7 JobName=n UserId=a(0) JobState={state} Requeue={requeue} Restarts={restarts} PreemptTime={preempted} X"


@pytest.mark.parametrize(
    ("shown", "back", "asked"),
    [
        ({"state": "COMPLETING", "restarts": 1}, True, False),  # scontrol requeue, or a node lost
        ({"state": "COMPLETING"}, False, False),  # scancel, or the time limit
        ({"state": "RUNNING"}, False, False),  # a signal that somebody sent
        ({"state": "RUNNING", "preempted": "2026-12-02T09:26:27"}, True, True),
        ({"state": "RUNNING", "preempted": "2026-12-02T09:26:27", "requeue": 0}, False, False),
    ],
)
def test_whether_slurm_starts_a_job_again(
    shown: dict[str, Any], back: bool, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SHOW.format(**{"requeue": 1, "restarts": 0, "preempted": "None", **shown})
    log = scontrol(tmp_path, monkeypatch, f'[ "$1" = requeue ] || echo "{text}"')
    assert SlurmJob("7", 0).comes_back() is back
    assert ("requeue 7" in log.read_text()) is asked


def test_a_job_that_may_not_be_requeued_is_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SHOW.format(state="RUNNING", requeue=1, restarts=0, preempted="None")
    scontrol(tmp_path, monkeypatch, f'[ "$1" = requeue ] && exit 1; echo "{text}"')
    assert SlurmJob("7", 0).give_back() is False


def test_who_cannot_be_asked_promises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmJob("7", 0).comes_back() is False


def test_only_jobs_for_slurm_are_slurm_jobs() -> None:
    local = parse_job({"name": "a", "script": {"path": "a.py"}})
    there = parse_job({"name": "a", "script": {"path": "a.py"}, "cluster": {"kind": "slurm", "nodes": 1, "slots": 1}})
    assert slurm_job(local, {"SLURM_JOB_ID": "7"}) is None  # local, inside somebody's allocation
    assert slurm_job(there, {}) is None
    found = slurm_job(there, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"})
    assert found is not None
    assert (found.number, found.restarts) == ("7", 3)


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Put a scontrol on the path that notes what it is asked."""
    log, program = folder / "asked", folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$*" >>{log}\n{body}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log
