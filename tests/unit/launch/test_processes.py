"""Finding and ending processes, on real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from mxdist import processes


def wait_until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def token() -> Iterator[str]:
    token = uuid.uuid4().hex
    yield token
    processes.terminate(token, grace_s=0)


def start(token: str, code: str) -> subprocess.Popen[str]:
    """Start Python code in a session of its own and wait for the word that it is ready."""
    environment = {**os.environ, processes.TOKEN_NAME: token}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


SLEEP = "import time; print('ready', flush=True); time.sleep(1000)"
IGNORE = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
FORK = """
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
else:
    os.wait()
    subprocess.Popen(["sleep", "1000"], env={})
    print("ready", flush=True)
time.sleep(1000)
"""


def test_processes_are_found_by_their_token(token: str) -> None:
    with start(token, SLEEP) as process:
        assert [found.pid for found in processes.find(token)] == [process.pid]
        assert processes.find(uuid.uuid4().hex) == []
        assert processes.find("") == [], "no token names no process"
        processes.terminate(token, grace_s=10)

    assert process.returncode == -signal.SIGTERM


def test_kill_after_the_grace(token: str) -> None:
    with start(token, IGNORE) as process:
        processes.terminate(token, grace_s=0.3)

    assert process.returncode == -signal.SIGKILL


def test_stopped_process_hears_term(token: str) -> None:
    with start(token, SLEEP) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: (processes.read(process.pid) or pytest.fail("gone")).state == "T")
        processes.terminate(token, grace_s=30)

    assert process.returncode == -signal.SIGTERM


def test_forks_sessions_and_empty_environments_are_found(token: str) -> None:
    with start(token, FORK):
        wait_until(lambda: len(processes.find(token)) == 3)
        found = processes.find(token)
        processes.terminate(token, grace_s=1)

    assert not [process for process in found if processes.alive(process.pid, process.start_time)]


def test_excluded_process_stays(token: str) -> None:
    with start(token, SLEEP) as stays, start(token, SLEEP) as goes:
        processes.terminate(token, grace_s=10, exclude=(stays.pid,))
        goes.wait()
        assert stays.poll() is None
        stays.kill()


def test_zombie_is_not_alive(token: str) -> None:
    with start(token, "print('ready', flush=True)") as process:
        started = processes.start_time(process.pid)
        wait_until(lambda: processes.read(process.pid) is None)
        assert processes.find(token) == []
        assert started is None or not processes.alive(process.pid, started)


def test_reused_id_is_another_process() -> None:
    started = processes.start_time(os.getpid())

    assert started is not None
    assert processes.alive(os.getpid(), started)
    assert not processes.alive(os.getpid(), started - 1)
    assert not processes.alive(1, processes.start_time(1) or 0), "init is never one of ours"


def test_token_must_match_as_a_whole(token: str) -> None:
    with start(token + "0", SLEEP):
        assert processes.find(token) == []
        processes.terminate(token + "0", grace_s=0)


def test_agents_of_a_job_are_found_with_it_but_not_by_its_own_processes(token: str) -> None:
    with start(token, SLEEP) as own, start(f"{token}.1", SLEEP) as first, start(f"{token}.12", SLEEP) as other:
        everybody = {process.pid for process in processes.find(token)}
        alone = [process.pid for process in processes.find(token, exact=True)]
        of_first = [process.pid for process in processes.find(f"{token}.1")]
        processes.terminate(f"{token}.1", grace_s=0, exact=True)
        left = {process.pid for process in processes.find(token)}
        processes.terminate(token, grace_s=0)

    assert everybody == {own.pid, first.pid, other.pid}
    assert (alone, of_first) == ([own.pid], [first.pid])
    assert left == {own.pid, other.pid}


def test_what_carries_a_channel_is_spared_with_all_that_it_started(token: str) -> None:
    parent = "import subprocess, time; subprocess.Popen(['sleep', '1000'], env={}, start_new_session=True)\n" + SLEEP
    with start(token, parent) as process:
        (child,) = {one.pid for one in processes.find(token)} - {process.pid}
        spared = [one.pid for one in processes.find(token, spare={child})]
        processes.terminate(token, grace_s=0, spare=lambda: {child})
        assert processes.start_time(child)
        os.kill(child, signal.SIGKILL)

    assert spared == [process.pid]
