"""Logs of any size and content: bounded in the run store and in memory, whole on the host, the end always there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from world.conftest import Jobs, log_of, wait_until

from mxdist import processes
from mxdist.launch.client import log_lines
from mxdist.spec import JobState


def test_lines_of_all_ranks_arrive_once_and_in_order(jobs: Jobs) -> None:
    script = """
        import os, time
        for number in range(2000):
            print(os.environ["HOROVOD_RANK"], number, "é", flush=number % 100 == 0)
            if number % 500 == 0:
                time.sleep(0.5)
    """
    attempt, _ = jobs.run(script, ranks=2)

    lines = log_of(attempt)
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}] ")] == [
            f"[{rank}] {rank} {number} é" for number in range(2000)
        ]


def test_two_hundred_megabytes(jobs: Jobs) -> None:
    script = """
        import os, sys, time
        line = b"x" * 99 + b"\\n"
        for _ in range(20):
            os.write(1, line * 100_000)
        os.write(1, b"the very end\\n")
        open(sys.argv[1] + "/written", "w").write("yes\\n")
        while not os.path.exists(sys.argv[1] + "/go"):
            time.sleep(0.05)
    """
    attempt = jobs.submit(jobs.job(script)).attempt
    supervisor = jobs.supervisor(attempt)
    before = _peak_kb(supervisor)
    wait_until(lambda: jobs.marks("written"), "200 MB")
    wait_until(lambda: "[0] the very end" in log_of(attempt), "the end of the log")
    growth = _peak_kb(supervisor) - before
    (jobs.folder / "go").touch()
    result = jobs.result(attempt)

    assert result.state is JobState.SUCCEEDED
    whole = jobs.attempt_dir(attempt) / "world-1" / "rank-0.log"
    assert whole.stat().st_size == 200_000_013
    stored = sum(entry.size_bytes for entry in attempt.store.list("logs/"))
    assert stored < 40 << 20
    assert growth < 100_000, "kilobytes"
    gaps = [line for line in log_of(attempt) if re.search(r"bytes left out here; the full log is .*rank-0\.log", line)]
    assert gaps


@pytest.mark.parametrize("size", [10_000, 5_000_000])
def test_very_long_line_is_cut(jobs: Jobs, size: int) -> None:
    attempt, _ = jobs.run(f"print('a' * {size})\nprint('after')\nprint('unended', end='')")

    lines = log_of(attempt)
    assert "[0] after" in lines
    assert "[0] unended" in lines
    assert max(len(line) for line in lines) < 10_000
    assert any(line.endswith("[the line goes on]") or "left out" in line for line in lines)


def test_binary_junk_and_progress_bars(jobs: Jobs) -> None:
    script = r"""
        import os
        os.write(1, bytes(range(256)) + b"\n")
        os.write(1, b"\x1b[31mred\x1b[0m\n")
        os.write(1, b"10%\r50%\r100%\n")
    """
    attempt, result = jobs.run(script)

    lines = log_of(attempt)
    assert result.state is JobState.SUCCEEDED
    assert "[0] red" in lines
    assert "[0] 100%" in lines
    assert not any(ord(character) < 32 and character != "\t" for line in lines for character in line)


def test_chunks_are_bounded(jobs: Jobs) -> None:
    attempt, _ = jobs.run("for number in range(20_000): print(number, 'x' * 30)")

    for _, lines in log_lines(attempt):
        assert 0 < len(lines) <= 500
        assert sum(len(text) for _, text in lines) <= 140_000


def test_next_supervisor_picks_up_the_lines_that_a_killed_one_left(jobs: Jobs) -> None:
    import os
    import signal

    script = """
        import os, sys, time
        first = not os.path.exists(sys.argv[1] + "/again")
        print("first" if first else "second", flush=True)
        open(sys.argv[1] + "/again", "a").write("again\\n")
        while first:
            time.sleep(0.05)
            if os.path.exists(sys.argv[1] + "/stopped"):
                print("said while nobody listened", flush=True)
                open(sys.argv[1] + "/said", "w").write("said\\n")
                time.sleep(100_000)
    """
    attempt = jobs.submit(jobs.job(script, max_restarts=1)).attempt
    wait_until(lambda: "[0] first" in log_of(attempt), "the first line")
    os.kill(jobs.supervisor(attempt), signal.SIGSTOP)
    (jobs.folder / "stopped").touch()
    wait_until(lambda: jobs.marks("said"), "the unheard line")
    os.kill(jobs.supervisor(attempt), signal.SIGKILL)
    wait_until(lambda: not processes.find(attempt.claim.token), "the end of all")
    assert jobs.client.revive(attempt)
    jobs.result(attempt)

    ours = [line for line in log_of(attempt) if line.startswith("[0] ")]
    assert ours == ["[0] first", "[0] said while nobody listened", "[0] second"]


def _peak_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1])
