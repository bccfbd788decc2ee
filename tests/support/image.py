"""Do what a Dockerfile says in a folder, without Docker: what Python installs is real, what needs root is left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envs.environments import Layout
from envs.host import find_python
from support.dockerfile import REPOSITORY, Stage, Step, ignored, stages

_SYSTEM = re.compile(r"^(apt-get|useradd|install -d|ldconfig)\b")
# An image keeps no cache; here the one of the machine is used, and nothing is compiled before it is needed.
_NOT_HERE = ("UV_NO_CACHE", "UV_LINK_MODE", "UV_COMPILE_BYTECODE")


@dataclass
class Image:
    """What came of a Dockerfile.

    :param root: stands for ``/``.
    :param environment: of its processes.
    :param left_out: commands that need root or Debian's packages.
    """

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def run(self, *command: str, **more: str) -> str:
        """Return what a command prints that runs with the image's environment.

        :raises AssertionError: it failed.
        """
        return self._run(list(command), {"HOME": str(self.root), **self.environment, **more}, self.root)

    def _run(self, command: list[str], environment: Mapping[str, str], folder: Path) -> str:
        search = f"{environment.get('PATH', '')}:{self.root / 'tools'}:{os.environ['PATH']}"
        settings = {**environment, "PATH": search}
        done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def place(self, text: str) -> str:
        """Return a text with the image's paths below ``root``."""
        return text.replace("/opt/", f"{self.root}/opt/")


def build(path: Path, root: Path) -> Image:
    """Return the image of a Dockerfile.

    :raises AssertionError: a step failed, or needs what an earlier one did not make.
    """
    image = Image(root)
    tools = root / "tools"
    tools.mkdir(parents=True)
    uv = Layout(REPOSITORY).find_uv()
    assert uv, "uv is not there; `make environments` brings it"
    (tools / "uv").symlink_to(uv)
    python = shutil.which(find_python() or "python3.11")
    assert python, "Python 3.11 is not there"
    for name in ("python", "python3.11"):
        (tools / name).symlink_to(python)
    for stage in stages(path):
        _build_stage(image, stage)
    return image


def _build_stage(image: Image, stage: Stage) -> None:
    image.environment = {}
    for step in stage.steps:
        if step.name == "COPY":
            _copy(image, step)
        elif step.name == "ENV":
            pairs = (pair.split("=", 1) for pair in step.words)
            image.environment |= {name: image.place(value) for name, value in pairs if name not in _NOT_HERE}
        elif step.name == "RUN":
            _shell(image, step)


def _shell(image: Image, step: Step) -> None:
    """Run the commands of a step, but for those that are left out."""
    commands = [command.strip() for command in step.text.split("&&")]
    if any(_SYSTEM.match(command) for command in commands):
        image.left_out += commands
        return
    folder = image.root / "build"
    folder.mkdir(exist_ok=True)
    # Proxies and certificates are the machine's affair, as they would be the builder's.
    machine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    image._run(["bash", "-ec", image.place(step.text)], {**machine, **image.environment}, folder)


def _copy(image: Image, step: Step) -> None:
    words = step.words
    if words[0] == "--from=uv":
        return
    if words[0].startswith("--from"):
        assert Path(image.place(words[1])).exists(), step.text
        return
    *sources, target = words
    folder = image.root / "build"
    for source in sources:
        end = image.root / target.lstrip("/") if target.startswith("/") else folder / target
        into = end / Path(source).name if target.endswith("/") or (target == "./") else end
        into.parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / source).is_dir():
            shutil.copytree(REPOSITORY / source, into, ignore=_not_sent)
        else:
            shutil.copy(REPOSITORY / source, into)


def _not_sent(folder: str, names: list[str]) -> set[str]:
    here = Path(folder).relative_to(REPOSITORY)
    return {name for name in names if ignored((here / name).as_posix())}
