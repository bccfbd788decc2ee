"""Code by its digest: published once, unpacked once a host, and refused when it is not what the digest says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import LaunchError
from mxdist.launch.bundle import Bundle
from mxdist.launch.delivery import as_zip, publish
from mxdist.launch.summon import command, frames
from mxdist.runtime import errands
from mxdist.store import open_store

CANARY = "canary-77aa"
PROBE = """
import json, os, sys
import helper
document = json.load(open(int(sys.argv[sys.argv.index("--document") + 1]), "rb"))
print("chatter")
print(json.dumps({"mxdist": "answer", "helper": helper.__file__, "cwd": os.getcwd(), "argv": sys.argv[1:],
                  "command": open("/proc/self/cmdline").read(), "folder": document["folder"],
                  "secret": document["secrets"], "environment": dict(os.environ)}))
"""
FILES = {
    "mxdist/__init__.py": b"",
    "mxdist/runtime/__init__.py": b"",
    "mxdist/runtime/probe.py": PROBE.encode(),
    "helper.py": b"VALUE = 1",
}


@pytest.fixture
def bundle() -> Bundle:
    return Bundle(FILES)


def summon(document: dict[str, Any], home: Path) -> tuple[int, dict[str, Any], str]:
    """Call mxdist onto this 'host'; return the exit code, the answer and what was said beside it."""
    done = subprocess.run(
        command(sys.executable), input=frames(document), capture_output=True, env={"HOME": str(home)}, cwd=home
    )
    lines = done.stdout.decode().splitlines()
    answers = [json.loads(line) for line in lines if line.startswith('{"mxdist"')]
    return done.returncode, answers[-1] if answers else {}, done.stderr.decode()


def document_of(code: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"what": "probe", "code": code, "secrets": {"AWS_SECRET_ACCESS_KEY": CANARY}, "environment": {}, **more}


def test_zip_depends_on_the_files_alone(bundle: Bundle) -> None:
    assert as_zip(bundle) == as_zip(Bundle(dict(reversed(FILES.items()))))


def test_code_is_published_once(bundle: Bundle, tmp_path: Path) -> None:
    runs = open_store(str(tmp_path / "runs"))
    first = publish(bundle, runs)
    (path,) = (tmp_path / "runs" / "_code").iterdir()
    before = path.stat()

    assert publish(bundle, runs) == first
    assert path.stat() == before
    assert path.name == f"{bundle.digest}.zip"
    assert first == {"how": "bundle", "uri": f"{runs.uri}/_code/{bundle.digest}.zip", "digest": bundle.digest}


def test_host_that_has_nothing_gets_the_code_and_runs_it(bundle: Bundle, tmp_path: Path) -> None:
    code = publish(bundle, open_store(str(tmp_path / "runs")))
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the folder it was started in')")
    status, answer, said = summon(document_of(code), tmp_path)

    unpacked = tmp_path / ".local/state/mxdist/jobs/code" / bundle.digest
    assert status == 0, said
    assert answer["helper"] == str(unpacked / "helper.py")
    assert CANARY not in answer["command"] + "".join(command(sys.executable))
    assert CANARY not in json.dumps(answer["environment"])
    assert answer["secret"] == {"AWS_SECRET_ACCESS_KEY": CANARY}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


def test_unpacked_once_however_many_come(bundle: Bundle, tmp_path: Path) -> None:
    code, workdir = publish(bundle, open_store(str(tmp_path / "runs"))), tmp_path / "disk"
    answers: list[dict[str, Any]] = []
    document = document_of(code, workdir=str(workdir))
    threads = [threading.Thread(target=lambda: answers.append(summon(document, tmp_path)[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {answer["helper"] for answer in answers} == {str(workdir / "code" / bundle.digest / "helper.py")}
    assert sorted(path.name for path in (workdir / "code").iterdir()) == [bundle.digest, f"{bundle.digest}.lock"]
    inode = os.stat(workdir / "code" / bundle.digest).st_ino
    assert summon(document, tmp_path)[0] == 0
    assert os.stat(workdir / "code" / bundle.digest).st_ino == inode


def test_code_that_was_changed_on_the_host_is_unpacked_anew(bundle: Bundle, tmp_path: Path) -> None:
    code, workdir = publish(bundle, open_store(str(tmp_path / "runs"))), tmp_path / "disk"
    document = document_of(code, workdir=str(workdir))
    summon(document, tmp_path)
    helper = workdir / "code" / bundle.digest / "helper.py"
    helper.write_text("raise SystemExit('spoilt')")

    assert summon(document, tmp_path)[0] == 0
    assert helper.read_bytes() == FILES["helper.py"]


@pytest.mark.parametrize("spoil", ["cut", "other", "gone"])
def test_code_that_is_not_what_its_digest_says_is_refused(bundle: Bundle, tmp_path: Path, spoil: str) -> None:
    code = publish(bundle, open_store(str(tmp_path / "runs")))
    (path,) = (tmp_path / "runs" / "_code").iterdir()
    if spoil == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    elif spoil == "other":
        path.write_bytes(as_zip(Bundle({**FILES, "helper.py": b"VALUE = 2"})))
    else:
        path.unlink()
    status, answer, _ = summon(document_of(code), tmp_path)

    assert (status, answer["mxdist"]) == (1, "error")
    expected = {"cut": "is damaged", "other": f"not {bundle.digest[:16]}", "gone": "cannot read"}[spoil]
    assert expected in answer["message"]
    assert not (tmp_path / ".local/state/mxdist/jobs/code" / bundle.digest).exists()


def test_bundle_may_not_leave_its_folder(tmp_path: Path) -> None:
    wicked = Bundle({**FILES, "../../wicked.py": b""})
    status, answer, _ = summon(document_of(publish(wicked, open_store(str(tmp_path / "runs")))), tmp_path)

    assert status == 1
    assert "would leave its folder" in answer["message"]


def test_shared_folder_is_used_as_it_is(tmp_path: Path) -> None:
    Bundle(FILES).write(tmp_path / "shared")
    status, answer, said = summon(document_of({"how": "shared", "folder": str(tmp_path / "shared")}), tmp_path)

    assert status == 0, said
    assert answer["helper"] == str(tmp_path / "shared" / "helper.py")


def test_shared_disk_that_is_not_there_is_named(tmp_path: Path) -> None:
    status, answer, _ = summon(document_of({"how": "shared", "folder": "/nowhere"}), tmp_path)

    assert status == 1
    assert (answer["message"], answer["hint"]) == (
        "/nowhere holds no mxdist.",
        "Is the shared disk mounted on this host?",
    )


def test_supervisor_that_does_not_start_leaves_no_secret(tmp_path: Path) -> None:
    document = {
        "folder": str(tmp_path), "python": "/bin/false", "token": "t", "incarnation": 1, "nonce": "n",
        "secrets": {"MXDIST_SSH_KEY": CANARY},
    }  # fmt: skip
    with pytest.raises(LaunchError, match="did not start"):
        errands.supervisor(document)
    assert [path.name for path in tmp_path.iterdir() if CANARY in path.read_text()] == []


def test_the_command_survives_any_login_shell() -> None:
    """In single quotes, csh and tcsh take neither a newline nor an exclamation mark."""
    *words, text = command("/opt/node/bin/python")
    assert words == ["/opt/node/bin/python", "-I", "-c"]
    assert not set("\n'!\\") & set(text)
