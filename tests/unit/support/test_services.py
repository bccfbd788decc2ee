"""What the tests themselves stand on: services that come back, and that nothing outlives a killed test run."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stack.airflow import Airflow, AirflowSecrets, AirflowSettings, write_private
from stack.local import LocalStack
from stack.mlflow import Mlflow
from stack.ports import free_ports, is_free
from stack.processes import PidFile, Process, ServiceError, boot_id, end, family, of_jobs, process, spawn, wait_until
from stack.seaweed import Seaweed
from stack.service import Service
from support.places import REPOSITORY, control_bin


def test_an_object_survives_a_crash_of_s3(seaweed: Seaweed, bucket: str) -> None:
    seaweed.client().put_object(Bucket=bucket, Key="a/b", Body=b"kept")
    seaweed.kill()
    assert not seaweed.alive()
    seaweed.start()
    assert seaweed.client().get_object(Bucket=bucket, Key="a/b")["Body"].read() == b"kept"


def test_mlflow_comes_back_on_the_same_port(mlflow_server: Mlflow) -> None:
    url = mlflow_server.url
    mlflow_server.stop()
    assert mlflow_server.status("/health") == 0
    mlflow_server.start()
    assert mlflow_server.url == url
    assert mlflow_server.status("/health") == 200


RUN = """
import os, sys
sys.path[:0] = [{scripts!r}, {tests!r}]
from pathlib import Path
from stack.processes import PidFile, spawn
from support.guarding import guarded

child = "import subprocess, time; subprocess.Popen(['sleep', '999']); time.sleep(999)"
with guarded(Path({folder!r})) as folder:
    pid_file = PidFile(folder / "x.pid")
    command = [sys.executable, "-c", child]
    spawn(command, environment=dict(os.environ), log=folder / "log", folder=folder, pid_file=pid_file)
    print("up", flush=True)
    sys.stdin.read()
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(999)"


def test_services_end_with_a_killed_test_run(tmp_path: Path) -> None:
    code = RUN.format(scripts=str(REPOSITORY / "scripts"), tests=str(REPOSITORY / "tests"), folder=str(tmp_path))
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdin is not None
    assert run.stdout.readline() == b"up\n"
    pid_file = PidFile(tmp_path / "x.pid")
    assert wait_until(lambda: pid_file.read() is not None, 30)
    leader = pid_file.read()
    assert leader is not None
    assert wait_until(lambda: len(family([leader])) == 2, 30)
    run.kill()
    run.wait()
    run.stdin.close()
    run.stdout.close()
    assert wait_until(lambda: not family([leader]), 30)


def test_end_kills_what_ignores_a_polite_request(tmp_path: Path) -> None:
    log, pid_file = tmp_path / "log", PidFile(tmp_path / "x.pid")
    child = spawn(
        [sys.executable, "-c", DEAF], environment=dict(os.environ), log=log, folder=tmp_path, pid_file=pid_file
    )
    assert wait_until(lambda: log.exists() and "deaf" in log.read_text(), 30)
    leader = pid_file.read()
    assert leader is not None
    end(lambda: family([leader]), grace_s=0.2)
    assert child.wait(timeout=30) == -signal.SIGKILL


def test_a_stranger_with_the_same_pid_is_left_alone() -> None:
    me = process(os.getpid())
    assert me is not None
    before_me = Process(me.pid, me.start_time - 1)
    assert not before_me.alive()
    assert family([before_me]) == []


def test_a_pid_file_of_an_earlier_boot_means_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.pid").write_text(f'{{"pid": {os.getpid()}, "start_time": 1, "boot": "another"}}')
    assert PidFile(tmp_path / "x.pid").read() is None


def test_jobs_are_told_apart_by_their_scratch_folder(tmp_path: Path) -> None:
    mine, sibling = tmp_path / "jobs", tmp_path / "jobs-2"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(999)"],
            env={**os.environ, "MXDIST_TOKEN": "t", "MXDIST_ATTEMPT_DIR": f"{folder}/a/1"},
        )
        for folder in (mine, sibling)
    ]
    try:
        assert wait_until(lambda: [item.pid for item in of_jobs(mine)] == [children[0].pid], 30)
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = Mlflow(tmp_path, program=str(tmp_path / "no-such-program"))
    with pytest.raises(ServiceError, match="no-such-program"):
        server.start()


def seaweed_at(folder: Path, weed: str) -> Seaweed:
    return Seaweed(folder, access_key="mxdist-test", secret_key="mxdist-test-secret", weed=weed)


def test_a_port_that_was_taken_is_named_in_one_line(tmp_path: Path) -> None:
    """Somebody else may take a port between its choice and the start."""
    server = seaweed_at(tmp_path, str(control_bin() / "weed"))
    port = server.ports["volume.port"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        try:
            with pytest.raises(ServiceError) as caught:
                server.start()
        finally:
            server.kill()
    (line,) = str(caught.value).splitlines()
    assert line.startswith("seaweed ended with exit code ")
    assert str(port) in line
    assert "not available" in line


STACK = "\n\ngoroutine 135 [running]:\n" + "".join(
    f"github.com/seaweedfs/raft.f{depth}(0x18)\n\tgithub.com/raft@v1.2.1/server.go:{depth} +0x354\n"
    for depth in range(30)
)
WARNED = "W1202 15:04:12.327439 mini.go:736 mini: failed to persist dev secret\n  Master       starting\n"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (f"{WARNED}panic: write /d/m1/conf.tmp: no space left on device{STACK}", "conf.tmp: no space left on device"),
        (
            f'{WARNED}F1202 15:04:12.476471 mini.go:1328 Check Meta Folder (-dir="/d") Writable: Not valid!{STACK}',
            'Check Meta Folder (-dir="/d") Writable: Not valid!',
        ),
        (f"{WARNED}fatal error: runtime: out of memory{STACK}", "runtime: out of memory"),
        ("E1202 15:03:28.300492 mini.go:1244 Port allocation failed: port 1\n", "Port allocation failed: port 1"),
    ],
    ids=["disk full", "folder", "memory", "an error without a stack"],
)
def test_what_s3_died_of_is_not_hidden_by_its_stack(tmp_path: Path, log: str, said: str) -> None:
    (tmp_path / "seaweed.log").write_text("panic: of an earlier start\n")
    (tmp_path / "said").write_text(log)
    weed = tmp_path / "weed"
    weed.write_text(f"#!/bin/sh\ncat {tmp_path}/said\nexit 2\n")
    weed.chmod(0o755)
    server = seaweed_at(tmp_path, str(weed))
    with pytest.raises(ServiceError) as caught:
        server.start()
    (line,) = str(caught.value).splitlines()
    assert line.startswith("seaweed ended with exit code 2 while starting; ")
    assert line.endswith(f"{said} (log: {server.log})")


def test_a_folder_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "seaweed").write_text("a file where a folder must be")
    with pytest.raises(ServiceError) as caught:
        seaweed_at(tmp_path, "weed").start()
    (line,) = str(caught.value).splitlines()
    assert line.startswith("seaweed cannot be started: ")
    assert str(tmp_path / "seaweed") in line


class Squatted(Service):
    """A service that ends at once while another program answers in its name."""

    name = "squatted"

    def command(self) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(3)"]

    def ready(self) -> bool:
        assert self._child is not None
        self._child.wait(timeout=60)
        return True


def test_another_programs_answer_does_not_hide_that_the_service_ended(tmp_path: Path) -> None:
    service = Squatted(tmp_path, dict(os.environ))
    service.spawn()
    assert service._child is not None
    service._child.wait(timeout=60)
    with pytest.raises(ServiceError, match="ended with exit code 3 while starting"):
        service.wait_ready()


@pytest.mark.parametrize("text", ["http", "0", "65536", "-1", "80.5", "1e3"])
def test_setting_that_is_no_port_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MXDIST_MLFLOW_PORT", text)
    with pytest.raises(ServiceError, match=f"^MXDIST_MLFLOW_PORT={text} is no port: .*65535.$"):
        LocalStack(REPOSITORY, tmp_path)


def test_port_that_is_held_by_another_program_is_told_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _environment(tmp_path)
    port = free_ports(1)[0]
    monkeypatch.setenv("MXDIST_AIRFLOW_PORT", str(port))
    assert LocalStack(REPOSITORY, tmp_path).ports["airflow"] == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ServiceError, match=f"MXDIST_AIRFLOW_PORT={port}: another program listens"):
            LocalStack(REPOSITORY, tmp_path)
        pid_file = PidFile(tmp_path / "state/airflow/api-server.pid")
        me = process(os.getpid())
        assert me is not None
        pid_file.path.write_text(json.dumps({"pid": me.pid, "start_time": me.start_time, "boot": boot_id()}))
        assert LocalStack(REPOSITORY, tmp_path).ports["airflow"] == port, "our own Airflow holds it"


def test_airflow_keeps_its_name_when_its_port_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for home in ("a", "a", "b"):
        if not (tmp_path / home).exists():
            (tmp_path / home).mkdir()
            _environment(tmp_path / home)
        monkeypatch.setenv("MXDIST_AIRFLOW_PORT", str(free_ports(1)[0]))
        names.append(LocalStack(REPOSITORY, tmp_path / home).airflow.environment["MXDIST_AIRFLOW_ID"])
    assert names[0] == names[1] != names[2]


def test_one_port_for_two_services_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports(1)[0]
    monkeypatch.setenv("MXDIST_AIRFLOW_PORT", str(port))
    monkeypatch.setenv("MXDIST_MLFLOW_PORT", str(port))
    with pytest.raises(ServiceError, match=f"Port {port} is given to airflow and to mlflow"):
        LocalStack(REPOSITORY, tmp_path)


def _environment(home: Path) -> None:
    (home / "control").mkdir()
    (home / "control/pyvenv.cfg").write_text("")
    (home / "state/airflow").mkdir(parents=True)


def test_airflow_waits_for_a_busy_database(tmp_path: Path) -> None:
    settings = AirflowSettings(str(Path(sys.executable).with_name("airflow")), tmp_path / "dags", AirflowSecrets("x"))
    airflow = Airflow(tmp_path / "airflow", settings)
    airflow.folder.mkdir()
    ask = "settings.engine.raw_connection().execute('PRAGMA busy_timeout').fetchone()"
    command = [sys.executable, "-c", f"from airflow import settings; print({ask})"]
    environment = {**airflow.environment, "PYTHONPATH": str(REPOSITORY / "plugins")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["(60000,)"], done.stderr


def test_ports_are_free_and_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)


def test_a_private_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("older, open to all")
    path.chmod(0o644)
    write_private(path, "{}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "{}"


def test_no_password_stands_on_a_command_line(tmp_path: Path) -> None:
    mlflow = Mlflow(tmp_path, program="mlflow", password="canary")
    s3 = Seaweed(tmp_path, access_key="key", secret_key="canary", weed="weed")
    assert "canary" not in " ".join([*mlflow.command(), *s3.command()])
