"""What travels to the nodes, and its digest."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import SpecError
from mxdist.launch.bundle import Bundle, collect, collect_later
from mxdist.launch.plan import localize
from mxdist.spec import TrainingJob, parse_job


def script_job(path: Path) -> TrainingJob:
    job = parse_job({"name": "x", "script": {"path": str(path)}})
    assert isinstance(job, TrainingJob)
    return job


def user_files(path: Path) -> set[str]:
    return {name.removeprefix("user/") for name in collect(script_job(path)).files if name.startswith("user/")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in (
        "train.py", "helper.py", "config.yaml", "data.csv", "weights.params", ".hidden.py", "package/__init__.py",
        "package/inner/deep.py", "notes/readme.json", "venv/pyvenv.cfg", "venv/lib.py", ".git/hook.py",
        "__pycache__/train.py", "node_modules/x.py",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    return tmp_path


def test_script_comes_with_the_code_beside_it(project: Path) -> None:
    expected = {"train.py", "helper.py", "config.yaml", "package/__init__.py", "package/inner/deep.py"}

    assert user_files(project / "train.py") == expected


@pytest.mark.parametrize("name", [".Trash", "foreign"])
def test_folders_of_others_beside_the_script_are_passed_over(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before, stat = user_files(project / "train.py"), os.stat
    (project / name).mkdir()

    def forbidden(path: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and Path(path).is_relative_to(project / name) and Path(path) != project / name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr("os.stat", forbidden)
    assert user_files(project / "train.py") == before


def test_scratch_folders_beside_the_script_are_no_code_of_the_user(project: Path) -> None:
    """Else each attempt would hold those before it, and look like other code."""
    job = script_job(project / "train.py")
    before, bundle = user_files(project / "train.py"), collect(job)
    for attempt in ("0000000001", "0000000002"):
        bundle.write(project / "work/train-1" / attempt / "code")

    assert user_files(project / "train.py") == before
    assert collect(job).user_digest == bundle.user_digest


def test_package_itself_comes_along() -> None:
    files = collect(
        parse_job({"name": "x", "model": {"name": "mlp"}, "dataset": {"manifest_uri": "m", "version": "0" * 64}})
    )

    assert {"mxdist/__init__.py", "mxdist/runtime/rank.py", "mxdist/spec/job.py"} <= set(files.files)
    assert not [name for name in files.files if not name.startswith("mxdist/")]


def test_script_without_a_suffix_comes_along(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("print(1)")

    assert user_files(tmp_path / "train") == {"train"}


def test_digest_changes_with_content_and_with_names() -> None:
    digests = [Bundle(files).digest for files in ({"a": b"1"}, {"a": b"2"}, {"b": b"1"}, {"a": b"1", "b": b""})]

    assert len(set(digests)) == 4
    assert Bundle({"a": b"1", "b": b"2"}).digest == Bundle({"b": b"2", "a": b"1"}).digest


def test_written_bundle_is_complete_and_stays(tmp_path: Path) -> None:
    Bundle({"a/b.py": b"1"}).write(tmp_path / "code")
    Bundle({"a/b.py": b"2"}).write(tmp_path / "code")

    assert (tmp_path / "code" / "a" / "b.py").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_what_failed_or_was_killed_halfway_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".code-killed").mkdir()
    (tmp_path / ".code-killed" / "a.py").write_bytes(b"half")
    too_long = "n" * 300
    with pytest.raises(OSError, match="name too long"):
        Bundle({"a.py": b"1", too_long: b"2"}).write(tmp_path / "code")
    assert [path.name for path in tmp_path.iterdir()] == [".code-killed"], "another may still be writing it"
    Bundle({"a.py": b"1"}).write(tmp_path / "code")

    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_writers_at_once_leave_one_complete_bundle(tmp_path: Path) -> None:
    bundle = Bundle({f"{number}.py": b"x" for number in range(200)})
    for turn in range(5):
        folder = tmp_path / f"{turn}"
        folder.mkdir()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _, code=folder / "code": bundle.write(code), range(4)))
        assert [path.name for path in folder.iterdir()] == ["code"]
        assert len(list((folder / "code").iterdir())) == 200


def test_user_digest_is_that_of_the_users_python_alone() -> None:
    def digest(**files: bytes) -> str:
        return Bundle({name.replace("__", "/").replace("_py", ".py"): data for name, data in files.items()}).user_digest

    base = digest(user__train_py=b"1", mxdist__a_py=b"1")
    assert digest(user__train_py=b"1", mxdist__a_py=b"2") == base
    assert digest(user__train_py=b"2", mxdist__a_py=b"1") != base
    assert Bundle({"user/train.py": b"1", "user/config.yaml": b"1"}).user_digest == base
    assert Bundle({"user/train": b"1"}).user_digest != Bundle({"user/train": b"2"}).user_digest


def test_files_are_read_when_they_are_needed_and_once(tmp_path: Path) -> None:
    later = collect_later(script_job(tmp_path / "train.py"))
    (tmp_path / "train.py").write_text("1")
    assert later.files["user/train.py"] == b"1"
    (tmp_path / "train.py").unlink()
    assert later.files["user/train.py"] == b"1"


def test_job_is_pointed_at_the_bundle(project: Path) -> None:
    there = localize(script_job(project / "train.py"), Path("/code"))
    assert isinstance(there, TrainingJob)
    assert there.script is not None
    assert there.script.path == "/code/user/train.py"

    data = {"manifest_uri": "m", "version": "0" * 64}
    recipe = parse_job({"name": "x", "model": {"recipe": str(project / "helper.py")}, "dataset": data})
    there = localize(recipe, Path("/code"))
    assert isinstance(there, TrainingJob)
    assert there.model is not None
    assert there.model.recipe == "/code/user/helper.py"

    module = parse_job({"name": "x", "model": {"recipe": "package.module"}, "dataset": data})
    assert localize(module, Path("/code")) == module


def test_too_much_beside_the_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "huge.py").write_bytes(b"#" * (33 << 20))

    with pytest.raises(SpecError, match=r"script\.path.*give it a folder of its own"):
        collect(script_job(tmp_path / "train.py"))
