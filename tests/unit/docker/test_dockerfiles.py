"""The Dockerfiles: pinned, small, without root and secrets; what they copy is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from envs.environments import UV_VERSION
from support.dockerfile import FILES, REPOSITORY, copied, ignored, stages

HADOLINT = Path(sys.executable).parent / "hadolint"
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|KEY|CREDENTIAL", re.IGNORECASE)
files = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_there_are_three_images() -> None:
    assert [path.name.removesuffix(".Dockerfile") for path in FILES] == ["control", "node-cpu", "node-cu112"]


@files
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([HADOLINT, "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@files
def test_every_base_has_the_version_in_its_tag(path: Path) -> None:
    aliases: set[str] = set()
    for stage in stages(path):
        assert stage.base in aliases or re.search(r":\d+\.\d+\.\d+(-[a-z0-9.-]+)?$", stage.base), stage.base
        aliases.add(stage.alias)
    for stage in stages(path):
        sources = re.findall(r"--from=(\S+)", "\n".join(step.text for step in stage.named("COPY")))
        assert set(sources) <= aliases


@files
def test_uv_is_the_one_of_the_environments(path: Path) -> None:
    assert [stage.base for stage in stages(path) if stage.alias == "uv"] == [f"ghcr.io/astral-sh/uv:{UV_VERSION}"]


@files
def test_the_image_is_not_run_by_root(path: Path) -> None:
    last = stages(path)[-1]
    assert [step.text for step in last.named("USER")] == ["1000:1000"]
    assert [step.name for step in last.steps[-3:]] in (["RUN", "ENTRYPOINT", "CMD"], ["EXPOSE", "ENTRYPOINT", "CMD"])


@files
def test_nothing_is_left_for_a_later_layer_to_remove(path: Path) -> None:
    for stage in stages(path):
        assert not stage.named("ADD")
        for command in stage.runs():
            if "apt-get install" in command:
                assert "--no-install-recommends" in command
                assert "rm -rf /var/lib/apt/lists/*" in command
            assert not re.search(r"\b(curl|wget)\b|https?://", command)
            assert "uv " not in command or any("UV_NO_CACHE=1" in step.text for step in stage.named("ENV"))


@files
def test_the_last_stage_has_neither_compiler_nor_installer(path: Path) -> None:
    last = stages(path)[-1]
    assert not re.search(r"\b(uv|pip|g\+\+|make|\S+-dev)\b", "\n".join(last.runs()))
    assert "devel" not in last.base


@files
def test_no_secret_is_built_in(path: Path) -> None:
    for stage in stages(path):
        for step in [*stage.named("ENV"), *stage.named("ARG")]:
            assert not SECRET.search(step.text), step.text


@files
def test_what_is_copied_is_there_and_reaches_the_builder(path: Path) -> None:
    paths = [source for stage in stages(path) for source in copied(stage)]
    assert paths
    for source in paths:
        assert (REPOSITORY / source).exists(), source
        assert not ignored(source), source


@pytest.mark.parametrize(
    ("path", "kept_away"),
    [
        ("docker/.env", True), (".git", True), (".git/config", True), (".mxdist/state/passwords.json", True),
        ("plugins/mxdist/__pycache__/errors.pyc", True), ("tests/conftest.py", True), ("bench", True),
        ("plugins/mxdist/errors.py", False), ("requirements-node.txt", False), ("docker/node-sshd", False),
    ],
)  # fmt: skip
def test_dockerignore(path: str, kept_away: bool) -> None:
    assert ignored(path) is kept_away


@pytest.mark.parametrize("path", FILES[1:], ids=lambda path: path.stem)
def test_host_keys_are_not_part_of_a_node_image(path: Path) -> None:
    (install,) = [command for command in stages(path)[-1].runs() if "openssh-server" in command]
    assert "/etc/ssh/ssh_host_*" in install.partition("rm -rf")[2]


def test_cuda_is_what_mxnet_was_built_for() -> None:
    (wheel,) = [stage for stage in stages(FILES[2]) if stage.alias == "wheel"]
    assert wheel.base.startswith("nvidia/cuda:11.2.")
    assert "cudnn8-devel" in wheel.base
    assert "libopenmpi-dev" in "\n".join(wheel.runs())
    pinned = (REPOSITORY / "requirements-node-cu112.txt").read_text()
    for line in ("mxnet-cu112==1.9.1", "nvidia-cudnn-cu11==8.", "nvidia-nccl-cu11==2."):
        assert f"\n{line}" in pinned
