"""Cancel, deadline, preemption: asked first, forced after the grace, and nothing is left."""

from __future__ import annotations

import json
import os
import signal

from world.conftest import Jobs, wait_until

from mxdist import processes
from mxdist.launch import Life
from mxdist.spec import JobState

STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    note = lambda: open(sys.argv[1] + "/pids", "a").write(f"{os.getpid()}\\n")
    note()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note()
            time.sleep(100_000)
        os._exit(0)
    subprocess.Popen(["sleep", "100000"], env={}, start_new_session=False)
    time.sleep(100_000)
"""


def test_cancel_ends_a_script_that_ignores_term_and_double_forks(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(STUBBORN, ranks=2, grace_s=1)).attempt
    wait_until(lambda: len(jobs.marks("pids")) == 4, "four processes")
    sleepers = [process for process in processes.find(attempt.claim.token) if _is_sleep(process.pid)]
    result = jobs.client.cancel(attempt, by="user", reason="enough")

    assert result.state is JobState.CANCELLED
    assert result.cause is not None
    assert "enough" in result.cause.message
    assert processes.find(attempt.claim.token) == []
    assert not [pid for pid in jobs.marks("pids") if processes.start_time(int(pid))]
    assert len(sleepers) == 2, "a child with an empty environment is one of ours"
    assert not [one for one in sleepers if processes.alive(one.pid, one.start_time)]


def test_cancel_is_idempotent(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job("import time\ntime.sleep(100_000)")).attempt
    first = jobs.client.cancel(attempt, by="user", reason="one")
    second = jobs.client.cancel(attempt, by="airflow", reason="two")

    assert first == second
    intent = attempt.cancel_intent()
    assert intent is not None
    assert (intent.by, intent.reason) == ("user", "one")


def test_cancel_of_a_job_that_was_never_started(jobs: Jobs) -> None:
    attempt = jobs.claim(jobs.job("pass"))

    assert jobs.client.cancel(attempt, by="user", reason="never mind").state is JobState.CANCELLED
    assert attempt.supervisors.last() == 0


def test_cancel_when_the_supervisor_is_dead(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job(STUBBORN)).attempt
    wait_until(lambda: len(jobs.marks("pids")) == 2, "both processes")
    os.kill(jobs.supervisor(attempt), signal.SIGKILL)
    wait_until(lambda: jobs.launcher.life(attempt) is Life.DEAD, "the supervisor's end")
    assert processes.find(attempt.claim.token), "the double-forked child outlives the rank"

    assert jobs.client.cancel(attempt, by="user", reason="test").state is JobState.CANCELLED
    assert processes.find(attempt.claim.token) == []


def test_cancel_when_the_supervisor_hangs(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job("import time\ntime.sleep(100_000)")).attempt
    jobs.rank_pids(attempt, 1)
    os.kill(jobs.supervisor(attempt), signal.SIGSTOP)

    assert jobs.client.cancel(attempt, by="user", reason="test", wait_s=2).state is JobState.CANCELLED
    assert processes.find(attempt.claim.token) == []


def test_cancel_intent_without_a_client_is_enough(jobs: Jobs) -> None:
    attempt = jobs.submit(jobs.job("import time\ntime.sleep(100_000)")).attempt
    attempt.request_cancel("airflow", "run deleted")

    result = jobs.result(attempt)
    assert result.state is JobState.CANCELLED
    assert result.cause is not None
    assert "airflow" in result.cause.message


def test_submission_after_a_cancel_starts_again(jobs: Jobs) -> None:
    job = jobs.job("import time\ntime.sleep(100_000)")
    first = jobs.submit(job).attempt
    first.request_cancel("user", "cleared")

    second = jobs.submit(job)
    assert (second.how, second.attempt.number, second.attempt.claim.origin) == ("started", 2, 2)
    assert processes.find(first.claim.token) == []
    jobs.client.cancel(second.attempt, by="user", reason="test")


def test_deadline_counts_from_the_submission(jobs: Jobs) -> None:
    attempt, result = jobs.run("import time\ntime.sleep(100_000)", deadline_s=4, grace_s=1)

    assert result.state is JobState.DEADLINE
    assert result.cause is not None
    assert result.cause.kind == "deadline"
    assert attempt.claim.deadline_at == attempt.claim.submitted_at + 4
    assert result.ended_at >= attempt.claim.submitted_at + 4


def test_deadline_is_kept_by_a_client_when_the_supervisor_is_dead(jobs: Jobs) -> None:
    attempt = jobs.claim(jobs.job("pass"))

    assert jobs.client.cancel(attempt, by="deadline", reason="its time is up").state is JobState.DEADLINE


def test_term_of_the_supervisor_preempts(jobs: Jobs) -> None:
    script = """
        import signal, sys, time
        def leave(number, frame):
            open(sys.argv[1] + "/left", "a").write("left\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        open(sys.argv[1] + "/ready", "a").write("ready\\n")
        time.sleep(100_000)
    """
    job = jobs.job(script, ranks=2)
    attempt = jobs.submit(job).attempt
    wait_until(lambda: len(jobs.marks("ready")) == 2, "both ranks")
    os.kill(jobs.supervisor(attempt), signal.SIGTERM)
    result = jobs.result(attempt)

    assert result.state is JobState.PREEMPTED
    assert len(jobs.marks("left")) == 2, "every rank was asked, none killed"
    again = jobs.submit(job)
    assert (again.attempt.number, again.attempt.claim.origin) == (2, 1), "the training goes on"
    jobs.client.cancel(again.attempt, by="user", reason="test")


def test_script_with_a_worker_checkpoints_and_goes_on(jobs: Jobs) -> None:
    script = """
        import json, sys, time
        from pathlib import Path
        from mxdist.runtime.worker import Worker
        worker = Worker.current()
        saved = Path(sys.argv[1]) / "saved"
        begin = int(saved.read_text()) if saved.exists() else 0
        for step in range(begin, 100_000):
            worker.beat(step)
            worker.log_metrics({"loss": 1.0 / (step + 1)}, step=step)
            worker.progress(epoch=1, epochs=1, step=step, steps=100_000, samples_per_s=7.0, metrics={"loss": 0.5})
            if begin and step > begin + 3:
                break
            if worker.should_stop():
                saved.write_text(str(step))
                worker.stop()
            time.sleep(0.05)
        worker.write_result({"state": "done", "metrics": {"loss": 0.25}, "outputs": {"begin": begin}, "steps": step})
    """
    job = jobs.job(script)
    attempt = jobs.submit(job).attempt
    wait_until(lambda: attempt.read_state().step >= 5, "some steps")
    state = attempt.read_state()
    assert (state.state, state.epochs, state.metrics, state.samples_per_s) == (JobState.RUNNING, 1, {"loss": 0.5}, 7.0)
    os.kill(jobs.supervisor(attempt), signal.SIGTERM)
    assert jobs.result(attempt).state is JobState.PREEMPTED

    again = jobs.submit(job).attempt
    result = jobs.result(again)
    assert result.state is JobState.SUCCEEDED
    assert result.metrics == {"loss": 0.25}
    assert result.outputs["begin"] >= 5
    control = json.loads((jobs.attempt_dir(attempt) / "world-1" / "control.json").read_text())
    assert control == {"stop": True, "reason": "preempt"}


def _is_sleep(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().startswith("sleep")
    except OSError:
        return False
