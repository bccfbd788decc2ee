"""What an attempt's result says when MLflow could not be told at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mxdist.runtime.finish import Finisher, Outcome, Tracker
from mxdist.spec import JobState, TrainingJob
from mxdist.store import JobRun, open_store


@pytest.mark.parametrize(
    ("uri", "complete", "error"),
    [
        ("http://127.0.0.1:9", False, "tracking could not be started: this is not installed"),
        (None, True, None),
    ],
)
def test_the_result_says_why_tracking_never_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str | None, complete: bool, error: str | None
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("this is not installed")

    monkeypatch.setattr("mxdist.tracking.forwarder.Forwarder", broken)
    job = TrainingJob.parse({"name": "digits", "script": {"path": "train.py"}, "tracking": {"uri": uri}})
    attempt = JobRun(open_store(str(tmp_path / "runs")), "digits-1").claim(job, after=0, code_digest="c0de")
    tracker = Tracker(attempt, job, tmp_path / "journal.jsonl", {})
    tracker.start()
    result = Finisher(attempt, job, tmp_path, tracker, lambda: True).finish(Outcome(JobState.SUCCEEDED))
    assert (result.state, result.tracking_complete, result.tracking_error) == (JobState.SUCCEEDED, complete, error)
