"""A supervisor that dies when no restart is left: what was trained is published, what was not is lost, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from world.conftest import Jobs, log_of, wait_until

from mxdist.launch import Life
from mxdist.spec import JobState
from mxdist.store import Attempt

TRAIN = """
    import os, sys, time
    from pathlib import Path
    from mxdist.tracking.journal import JournalWriter
    writer = JournalWriter(Path(os.environ["MXDIST_ATTEMPT_DIR"], "journal.jsonl"))
    open(sys.argv[1] + "/ready", "a").write("ready\\n")
    while not os.path.exists(sys.argv[1] + "/go"):
        time.sleep(0.05)
    for step in range(3):
        writer.append({"loss": 1.0}, step=step)
    writer.close()
    print("the last words")
    open(sys.argv[1] + "/trained", "a").write("trained\\n")
"""


def kill(jobs: Jobs, attempt: Attempt) -> None:
    os.kill(jobs.supervisor(attempt), signal.SIGKILL)
    wait_until(lambda: jobs.launcher.life(attempt) is Life.DEAD, "the supervisor's end")


def test_killed_while_it_publishes(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    barriers = jobs.folder / "barriers"
    barriers.mkdir()
    monkeypatch.setenv("MXDIST_BARRIERS", str(barriers))
    hold = barriers / "job.supervisor-before-result.hold"
    hold.touch()
    (jobs.folder / "go").touch()
    attempt = jobs.submit(jobs.job(TRAIN, max_restarts=0)).attempt
    wait_until((barriers / "job.supervisor-before-result.reached").exists, "the barrier")
    kill(jobs, attempt)
    hold.unlink()

    assert jobs.client.revive(attempt)
    assert jobs.result(attempt).state is JobState.SUCCEEDED
    assert jobs.marks("trained") == ["trained"], "trained once, published by the second"


def test_tail_of_log_and_journal_is_published_by_the_next(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(TRAIN, max_restarts=0)).attempt
    wait_until(lambda: jobs.marks("ready"), "the rank")
    supervisor, runs, away = jobs.supervisor(attempt), jobs.folder / "runs", jobs.folder / "away"
    runs.rename(away)
    runs.write_text("a file where a folder should be: nothing more is mirrored")
    (jobs.folder / "go").touch()
    wait_until((jobs.attempt_dir(attempt) / "outcome.json").exists, "the end of training")
    os.kill(supervisor, signal.SIGKILL)
    runs.unlink()
    away.rename(runs)
    wait_until(lambda: jobs.launcher.life(attempt) is Life.DEAD, "the supervisor's end")
    assert "[0] the last words" not in log_of(attempt)

    assert jobs.client.revive(attempt)
    assert jobs.result(attempt).state is JobState.SUCCEEDED
    assert log_of(attempt).count("[0] the last words") == 1
    assert [r["step"] for _, chunk in attempt.journal.read() for r in chunk["records"]] == [0, 1, 2]
    assert jobs.marks("trained") == ["trained"]


STEPS = """
    import os, sys, time
    from pathlib import Path
    from mxdist.tracking.journal import JournalWriter
    folder = Path(sys.argv[1])
    again = (folder / "began").exists()
    (folder / "began").touch()
    writer = JournalWriter(Path(os.environ["MXDIST_ATTEMPT_DIR"], "journal.jsonl"))
    for step in range(8, 15) if again else range(10):
        writer.append({"loss": 1.0}, step=step)
    while not again:
        time.sleep(0.05)
"""


def test_journal_is_made_whole_after_a_power_loss(jobs: Jobs) -> None:
    def records() -> list[tuple[int, int]]:
        return [(r["n"], r["step"]) for _, chunk in attempt.journal.read() for r in chunk["records"]]

    attempt = jobs.submit(jobs.job(STEPS, max_restarts=1)).attempt
    wait_until(lambda: len(records()) == 10, "the copy of the journal")
    kill(jobs, attempt)
    journal = jobs.attempt_dir(attempt) / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:5]))

    assert jobs.client.revive(attempt)
    assert jobs.result(attempt).state is JobState.SUCCEEDED
    assert records() == list(enumerate([*range(10), *range(8, 15)], start=1))


def test_nothing_is_trained_beyond_the_budget(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(TRAIN, max_restarts=0)).attempt
    wait_until(lambda: jobs.marks("ready"), "the rank")
    kill(jobs, attempt)
    assert jobs.client.revive(attempt)
    result = jobs.result(attempt)

    assert result.cause is not None
    assert (result.state, result.cause.kind, result.cause.retryable) == (JobState.FAILED, "lost", True)
    assert jobs.marks("ready") == ["ready"]


def test_submission_after_the_budget_was_spent_starts_the_next_attempt(jobs: Jobs) -> None:
    job = jobs.job(TRAIN, max_restarts=0)
    attempt = jobs.submit(job).attempt
    wait_until(lambda: jobs.marks("ready"), "the rank")
    kill(jobs, attempt)
    again = jobs.submit(job)
    (jobs.folder / "go").touch()

    assert (again.how, again.attempt.number, again.attempt.claim.origin) == ("started", 2, 1)
    assert jobs.result(again.attempt).state is JobState.SUCCEEDED


def test_script_that_was_removed_meanwhile_is_not_needed(jobs: Jobs) -> None:
    job = jobs.job(TRAIN, max_restarts=1)
    attempt = jobs.submit(job).attempt
    wait_until(lambda: jobs.marks("ready"), "the rank")
    assert job.script is not None
    Path(job.script.path).unlink()
    assert jobs.submit(job).how == "reattached"
    kill(jobs, attempt)
    assert jobs.client.revive(attempt)
    (jobs.folder / "go").touch()

    assert jobs.result(attempt).state is JobState.SUCCEEDED


def test_changed_script_begins_from_scratch_and_the_log_says_so(jobs: Jobs) -> None:
    first, _ = jobs.run("import sys\nsys.exit(3)")
    same = jobs.submit(jobs.job("import sys\nsys.exit(3)")).attempt
    jobs.result(same)
    changed = jobs.submit(jobs.job("print('mended')")).attempt
    jobs.result(changed)

    assert (first.claim.origin, same.claim.origin, changed.claim.origin) == (1, 1, 3)
    (line,) = [line for line in log_of(changed) if "from scratch" in line]
    assert line.startswith("[mxdist] training begins from scratch")
    assert "the code was changed" in line
    assert str(jobs.folder / "scripts" / "job.py") in line
