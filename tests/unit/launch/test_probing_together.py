"""Probes that share one channel, as ``srun`` gives it: each reads the same, all write to one output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import LaunchError
from mxdist.launch import probing_together
from mxdist.launch.probing_together import look_together
from mxdist.launch.summon import command
from mxdist.runtime.channel import Channel, PipeChannel
from support.places import node_python

LIKE_SRUN = """
import os, subprocess, sys
names, command = sys.argv[1].split(","), sys.argv[2:]
tasks = []
for number, name in enumerate(names):
    environment = {**os.environ, "SLURMD_NODENAME": name, "SLURM_PROCID": str(number)}
    words = ["sleep", "1000"] if name.endswith("hangs") else command
    tasks.append(subprocess.Popen(words, stdin=subprocess.PIPE, env=environment))
while data := os.read(0, 65536):
    for task in tasks:
        task.stdin.write(data)
        task.stdin.flush()
for task in tasks:
    task.stdin.close()
    if task.args[0] == "sleep":
        task.kill()
    task.wait()
"""


@contextmanager
def started(*names: str) -> Iterator[Channel]:
    words = [sys.executable, "-c", LIKE_SRUN, ",".join(names), *command(str(node_python()))]
    channel = PipeChannel(words, dict(os.environ))
    try:
        yield channel
    finally:
        channel.close()


def request(folder: Path, **more: Any) -> dict[str, Any]:
    return {"workdir": str(folder), "network": True, **more}


def test_nodes_tell_their_names_and_find_each_other(tmp_path: Path) -> None:
    with started("n1", "n2", "n3") as channel:
        reports = look_together(channel, 3, request(tmp_path, mlflow={"uri": "http://127.0.0.1:9", "experiment": "x"}))
    assert sorted(reports) == ["n1", "n2", "n3"]
    assert all(len(one.reached or {}) == 2 for one in reports.values())
    assert all(one.skew_s is not None and abs(one.skew_s) - one.doubt_s < 0.5 for one in reports.values())
    assert {name for name in reports["n1"].unresolved} == {"n1", "n2", "n3"}  # names of this test alone
    assert [name for name, one in sorted(reports.items()) if "mlflow" in one.found] == ["n1"]


def test_node_that_hangs_keeps_the_others_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing_together, "FIRST_S", 6.0)
    with started("n1", "n2-hangs", "n3") as channel:
        reports = look_together(channel, 3, request(tmp_path))
    assert sorted(reports) == ["n1", "n3"]
    assert list(reports["n1"].reached or {}) == ["n3"]


def test_what_cannot_be_started_is_told_in_its_own_words(tmp_path: Path) -> None:
    channel = PipeChannel(["sh", "-c", "echo 'srun: error: nodes are busy' >&2; exit 1"], dict(os.environ))
    with pytest.raises(LaunchError, match="srun: error: nodes are busy"):
        look_together(channel, 2, request(tmp_path))
    channel.close()
