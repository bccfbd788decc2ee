"""What the launcher pod runs, as the process that it is: it finds its workers, keeps its keys, and hands over."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from mxdist.launch.kubernetes_pod import POD_NAME, command, packed
from mxdist.runtime import pod

BOOTSTRAP = """
import json, os, sys
def begin(document):
    print(json.dumps({"document": document, "environment": dict(os.environ), "name": __name__}), flush=True)
"""


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "id_rsa").write_text("-----BEGIN EC PRIVATE KEY-----\n")
    (folder / "id_rsa.pub").write_text("ecdsa-sha2-nistp521 AAAA comment\n")
    return folder


def start(tmp_path: Path, pair: Path, *, port: int, workers: int, **more: Any) -> subprocess.Popen[str]:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("127.0.0.1 slots=2\nlocalhost slots=2\nnot.needed slots=2\n")
    told = {"workers": workers, "pair": str(pair), "port": port, "secret_names": ["AWS_SECRET_ACCESS_KEY", "ABSENT"]}
    document = {"what": "supervisor", "pod": {**told, "hostfile": str(hostfile), **more}}
    environment = {
        "PATH": os.environ["PATH"],
        POD_NAME: packed("pod"),
        "MXDIST_BOOTSTRAP": base64.b64encode(zlib.compress(BOOTSTRAP.encode())).decode(),
        "MXDIST_DOCUMENT": json.dumps(document),
        "AWS_SECRET_ACCESS_KEY": "of-s3",
        "OTHER": "stays",
    }
    return subprocess.Popen(
        command(sys.executable), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_pod_adds_what_only_it_knows_and_hands_over(tmp_path: Path, pair: Path) -> None:
    with socket.create_server(("", 0)) as server:
        process = start(tmp_path, pair, port=server.getsockname()[1], workers=2)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    said = json.loads(out)
    assert said["document"] == {
        "what": "supervisor",
        "hosts": ["127.0.0.1", "localhost"],
        "secrets": {
            "AWS_SECRET_ACCESS_KEY": "of-s3",
            "MXDIST_SSH_KEY": "-----BEGIN EC PRIVATE KEY-----\n",
            "MXDIST_SSH_KNOWN_HOSTS": "* ecdsa-sha2-nistp521 AAAA",
        },
    }
    assert said["name"] != "__main__"
    left = {name for name in said["environment"] if not name.startswith("LC_")}
    assert left == {"PATH", "OTHER"}


def test_pod_waits_for_workers_that_start_later(tmp_path: Path, pair: Path) -> None:
    with socket.socket() as later:
        later.bind(("", 0))
        process = start(tmp_path, pair, port=later.getsockname()[1], workers=1)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2)
        later.listen()
        out, err = process.communicate(timeout=60)
    assert json.loads(out)["document"]["hosts"] == ["127.0.0.1"], err


def test_pod_says_which_workers_do_not_answer(tmp_path: Path, pair: Path) -> None:
    with socket.socket() as never:
        never.bind(("", 0))
        process = start(tmp_path, pair, port=never.getsockname()[1], workers=2, wait_s=0.1)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.strip() == "these workers do not answer: 127.0.0.1, localhost"


def test_pod_ends_at_once_when_it_is_asked_to(tmp_path: Path, pair: Path) -> None:
    with socket.socket() as never:
        never.bind(("", 0))
        process = start(tmp_path, pair, port=never.getsockname()[1], workers=1)
        begin = time.monotonic()
        caught = Path(f"/proc/{process.pid}/status")
        while not _catches(caught.read_text(), signal.SIGTERM):  # it has not come so far yet
            assert time.monotonic() - begin < 60
            time.sleep(0.01)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143


def test_hosts_are_told_once_they_all_answer() -> None:
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        timer = threading.Timer(0.3, later.listen)
        timer.start()
        assert pod.wait_for(["127.0.0.1"], later.getsockname()[1], time.monotonic() + 60) == []
        timer.join()


def test_blank_lines_are_no_workers() -> None:
    assert pod.workers("\na.b.svc slots=2\n\n  b.b.svc   slots=1  \n") == ["a.b.svc", "b.b.svc"]


def _catches(status: str, number: int) -> bool:
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)
