"""The conversation with the probes, for real: many at once, on hosts that answer, refuse or hang."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import LaunchError
from mxdist.launch import patience, probing
from mxdist.launch.hosts import HostPlan
from mxdist.launch.patience import bounded
from mxdist.launch.probing import canary, look
from mxdist.runtime.channel import Channel, CommandOpener
from mxdist.store import open_store
from support.places import node_python

PYTHON = str(node_python())
HANGS = 'case {host} in *-hangs) sleep 1000;; *-dies) echo "disk on fire" >&2; exit 3;; esac; exec "$@"'


def opener(script: str = HANGS) -> CommandOpener:
    """Hosts that are processes here, and behave as their names say."""
    return CommandOpener(("sh", "-c", script, "sh"))


def hosts(*names: str) -> list[HostPlan]:
    return [HostPlan(name, 1) for name in names]


def request(folder: Path, **more: Any) -> dict[str, Any]:
    return {"workdir": str(folder / "work"), "names": ["localhost"], "network": True, **more}


def test_sixteen_hosts_of_which_one_hangs_end_in_time(tmp_path: Path) -> None:
    names = [*(f"node{number}" for number in range(15)), "node-hangs"]
    begin = time.monotonic()
    reports = look(hosts(*names), opener(), PYTHON, request(tmp_path))
    assert time.monotonic() - begin < 20
    assert reports["node-hangs"].error == f"no answer in {probing.FIRST_S:g} s"
    others = [reports[name] for name in names[:-1]]
    assert [one.error for one in others] == [""] * 15
    assert all(one.reached is not None and len(one.reached) == 14 for one in others)
    assert all(one.skew_s is not None and abs(one.skew_s) - one.doubt_s < 0.5 for one in others)


def test_hosts_that_reach_each_other_say_so(tmp_path: Path) -> None:
    reports = look(hosts("a", "b", "c"), opener(), PYTHON, request(tmp_path))
    assert {name: sorted(one.reached or {}) for name, one in reports.items()} == {
        "a": ["b", "c"],
        "b": ["a", "c"],
        "c": ["a", "b"],
    }
    assert {told for one in reports.values() for seen in (one.reached or {}).values() for told in seen.values()} == {""}


def test_host_that_has_no_python_or_whose_probe_dies_is_told(tmp_path: Path) -> None:
    reports = look(hosts("a", "b-dies"), opener(), "/no/such/python", request(tmp_path))
    assert reports["a"].error.startswith("there is no Python at /no/such/python")
    assert reports["b-dies"].error == "the probe ended with exit code 3: disk on fire"


def test_chatter_of_a_login_shell_is_passed_over(tmp_path: Path) -> None:
    chatty = 'echo "Welcome to {host}!"; echo "{}"; exec "$@"'
    report = look(hosts("a"), opener(chatty), PYTHON, request(tmp_path))["a"]
    assert report.error == ""
    assert report.found["versions"]["mxnet"] == "1.9.1"
    assert report.found["versions"]["numpy"].startswith("1.23")


def test_probe_finds_what_is_wrong_with_its_node(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = request(tmp_path, workdir=str(tmp_path / "file/work"), names=["localhost", "nowhere.invalid"])
    given["runs"] = {"uri": str(tmp_path / "file/runs"), "nonce": "n", "token": "t"}
    given["reads"] = [str(tmp_path / "none.json")]
    given["mlflow"] = {"uri": "http://127.0.0.1:9", "experiment": "x"}
    found = look(hosts("a"), opener(), PYTHON, given)["a"].found
    assert found["names"] == ["nowhere.invalid"]
    assert "Not a directory" in found["disk"]["error"]
    assert "Not a directory" in found["runs"]["error"]
    assert "No such file" in found["reads"]["error"]
    assert "refused" in found["mlflow"]["error"]


def test_store_that_is_another_place_on_a_node_is_found(tmp_path: Path) -> None:
    runs = open_store(str(tmp_path / "runs"))
    with canary(runs) as written:
        place = {"uri": str(tmp_path / "runs"), "nonce": written.nonce, "token": written.token}
        elsewhere = {**place, "uri": str(tmp_path / "other")}
        assert "error" not in look(hosts("a"), opener(), PYTHON, request(tmp_path, runs=place))["a"].found["runs"]
        found = look(hosts("a"), opener(), PYTHON, request(tmp_path, runs=elsewhere))["a"].found
        assert "No such file" in found["runs"]["error"]
    assert [entry.key for entry in runs.list("")] == []


def test_nothing_of_a_probe_is_left(tmp_path: Path) -> None:
    look(hosts("a", "b"), opener(), PYTHON, request(tmp_path, runs={"uri": str(tmp_path / "runs"), "nonce": "n"}))
    assert list((tmp_path / "work").iterdir()) == []
    assert list((tmp_path / "runs/_preflight").iterdir()) == []


def test_deep_look_computes_on_every_device(tmp_path: Path) -> None:
    report = look(hosts("a"), opener(), PYTHON, request(tmp_path, deep=True))["a"]
    assert report.found["deep"]["devices"] == ["cpu(0)"]
    assert report.found["deep"]["import_s"] > 0


def test_fewer_gpus_are_counted_by_the_driver_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA A100-SXM4-40GB\necho NVIDIA A100-SXM4-40GB\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    report = look(hosts("a"), opener(), PYTHON, request(tmp_path))["a"]
    assert report.found["gpus"] == ["NVIDIA A100-SXM4-40GB"] * 2


def test_host_that_cannot_be_entered_says_why(tmp_path: Path) -> None:
    class Closed:
        def open(self, host: HostPlan, argv: Sequence[str]) -> Channel:
            raise LaunchError(f"cannot reach {host.name}: its key is another", hint="Compare fingerprints.")

    report = look(hosts("a"), Closed(), PYTHON, request(tmp_path))["a"]
    assert report.error == "cannot reach a: its key is another. Compare fingerprints."


def test_slow_work_of_the_submitter_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "OWN_S", 0.05)
    assert bounded(lambda: time.sleep(5) or "done", lambda why: why) == "no answer in 0.05 s"
    assert bounded(lambda: "done", lambda why: why) == "done"
