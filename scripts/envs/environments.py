"""The control and the node environment: made from pinned requirements, made again only when those change."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from envs import horovod, host
from steps import StepFailed, Steps, run

UV_VERSION = "0.13.9"
_STAMP = "mxdist-requirements.sha256"


@dataclass(frozen=True)
class Layout:
    """Where things lie in a checkout."""

    repository: Path

    @property
    def home(self) -> Path:
        """The one folder that everything generated goes to."""
        return self.repository / ".mxdist"

    @property
    def control(self) -> Path:
        """The control environment."""
        return self.home / "control"

    @property
    def node(self) -> Path:
        """The node environment."""
        return self.home / "node"

    @property
    def log(self) -> Path:
        """What the installers said."""
        return self.home / "environments.log"

    def find_uv(self) -> str | None:
        """Return uv: one that was brought earlier, or the machine's."""
        own = self.home / "uv/bin/uv"
        return str(own) if own.exists() else shutil.which("uv")


@dataclass(frozen=True)
class Environment:
    """One environment and the pinned files it is made from."""

    path: Path
    requirements: tuple[Path, ...]
    extra: str = ""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin/python"

    def digest(self) -> str:
        """Return what it must be made from. A venv cannot be moved, so its place counts."""
        parts = [str(self.path).encode(), self.extra.encode(), *(file.read_bytes() for file in self.requirements)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def ready(self) -> bool:
        """Return whether it is complete and up to date."""
        try:
            return self.python.exists() and (self.path / _STAMP).read_text() == self.digest()
        except OSError:
            return False

    def make(self, uv: str, base_python: str, layout: Layout, wheel: Path | None, editable: bool) -> None:
        """Make it from nothing."""
        run([uv, "venv", "-q", "--clear", "--python", base_python, str(self.path)], log=layout.log)
        install = [uv, "pip", "install", "-q", "--python", str(self.python)]
        files = [item for file in self.requirements for item in ("-r", str(file))]
        run([*install, *files, *([str(wheel)] if wheel else [])], log=layout.log)
        if editable:
            package = ["--no-deps", "--no-build-isolation", "-e", str(layout.repository)]
            run([*install, *package], log=layout.log)
        (self.path / _STAMP).write_text(self.digest())


def control_environment(layout: Layout, *, dev: bool) -> Environment:
    """Return the control environment as the checkout wants it."""
    names = ["requirements.txt", *(["requirements-dev.txt"] if dev else [])]
    files = [layout.repository / name for name in [*names, "pyproject.toml"]]
    return Environment(layout.control, tuple(files[:-1]), hashlib.sha256(files[-1].read_bytes()).hexdigest())


def node_environment(layout: Layout, *, dev: bool) -> Environment:
    """Return the node environment as the checkout wants it."""
    names = ["requirements-node.txt", *(["requirements-node-dev.txt"] if dev else [])]
    files = tuple(layout.repository / name for name in names)
    return Environment(layout.node, files, horovod.cache_key(files[0]))


def _needed(layout: Layout, dev: bool) -> tuple[Environment, Environment]:
    """Return both environments; one that has the tests' tools as well also serves those who do not need them."""
    chosen = []
    for make in (control_environment, node_environment):
        full = make(layout, dev=True)
        chosen.append(full if dev or full.ready() else make(layout, dev=False))
    return chosen[0], chosen[1]


def ensure(repository: Path, *, dev: bool, steps: Steps) -> None:
    """Make what is not there or not up to date.

    :raises StepFailed: something is missing on this machine, or a step failed.
    """
    layout = Layout(repository)
    control, node = _needed(layout, dev)
    if control.ready() and node.ready():
        return
    layout.home.mkdir(exist_ok=True)
    wheel = horovod.cached_wheel(repository / "requirements-node.txt")
    uv = layout.find_uv()
    found = host.missing(layout.home, compiler=wheel is None and not node.ready(), uv=uv)
    if found:
        raise StepFailed(host.report(found))
    layout.log.unlink(missing_ok=True)
    if uv is None:
        with steps.step("Bring uv"):
            uv = _bring_uv(layout)
    python = host.find_python() or "3.11"  # else uv brings one
    if not control.ready():
        with steps.step("Control environment (Airflow, MLflow)"):
            control.make(uv, python, layout, None, editable=True)
    if not node.ready():
        _make_node(node, uv, python, layout, wheel, steps)


def _make_node(node: Environment, uv: str, python: str, layout: Layout, wheel: Path | None, steps: Steps) -> None:
    if wheel is None:
        with steps.step("Build Horovod (once per machine)", lambda: horovod.build_progress(layout.log)):
            wheel = horovod.build_wheel(uv, python, layout.repository, layout.log)
    with steps.step("Node environment (MXNet, Horovod)"):
        node.make(uv, python, layout, wheel, editable=False)
        check = "import horovod.mxnet as hvd; assert hvd.gloo_built()"
        run([str(node.python), "-c", check], log=layout.log)


def _bring_uv(layout: Layout) -> str:
    home = layout.home / "uv"
    run([host.find_python() or sys.executable, "-m", "venv", "--clear", str(home)], log=layout.log)
    run([str(home / "bin/python"), "-m", "pip", "install", "-q", f"uv=={UV_VERSION}"], log=layout.log)
    return str(home / "bin/uv")


def lock(repository: Path) -> None:
    """Write the pinned files from the .in files; pins that still fit stay."""
    uv = Layout(repository).find_uv()
    if uv is None:
        raise StepFailed("uv is not there; `make test` brings it")
    # Debian 12 has 3.11.2, and some packages want a later 3.11.
    target = ["--python-version", "3.11.2", "--python-platform", "x86_64-manylinux_2_28"]
    command = [uv, "pip", "compile", "-q", *target, "--custom-compile-command", "make lock"]
    control, node = ["-c", "requirements.txt"], ["-c", "requirements-node.txt"]
    pinned = {"": [], "-dev": control, "-node": [], "-node-dev": node, "-horovod": node, "-node-cu112": []}
    for name, constraints in pinned.items():
        files = [f"requirements{name}.in", "-o", f"requirements{name}.txt"]
        subprocess.run([*command, *files, *constraints], cwd=repository, check=True, env=os.environ)
