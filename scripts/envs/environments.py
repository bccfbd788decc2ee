"""The control and the node environments: made from pinned requirements, made again only when those change."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envs import horovod, host
from steps import StepFailed, Steps, run

UV_VERSION = "0.13.9"
_STAMP, _TOOLS_STAMP = "mxdist-requirements.sha256", "mxdist-tools.sha256"


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
    def node_mpi(self) -> Path:
        """The node environment whose Horovod meets over MPI too."""
        return self.home / "node-mpi"

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
    """One environment, and the pinned files it is made from.

    :param requirements: what it is for. A change makes it anew, from nothing.
    :param tools: what the tests need beside that; added when asked for, without disturbing what runs there.
    :param extra: whatever else decides how it must be made.
    """

    path: Path
    requirements: Path
    tools: Path
    extra: str = ""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin/python"

    def ready(self) -> bool:
        """Return whether it is complete and up to date."""
        return self.python.exists() and self._stamp(_STAMP) == self._digest(self.requirements)

    def has_tools(self) -> bool:
        """Return whether the tests' tools are there and up to date."""
        return self.ready() and self._stamp(_TOOLS_STAMP) == self._digest(self.tools)

    def make(self, uv: str, base_python: str, log: Path, *more: str) -> None:
        """Make it from nothing; ``more`` are further things to install."""
        run([uv, "venv", "-q", "--clear", "--python", base_python, str(self.path)], log=log)
        self._install(uv, log, "-r", str(self.requirements), *more)

    def finish(self) -> None:
        """Note that it is complete."""
        (self.path / _STAMP).write_text(self._digest(self.requirements))

    def add_tools(self, uv: str, log: Path) -> None:
        """Add the tests' tools."""
        self._install(uv, log, "-r", str(self.tools), "-c", str(self.requirements))
        (self.path / _TOOLS_STAMP).write_text(self._digest(self.tools))

    def install_package(self, uv: str, log: Path, repository: Path) -> None:
        """Install mxdist itself, so that edits take effect at once."""
        self._install(uv, log, "--no-deps", "--no-build-isolation", "-e", str(repository))

    def _install(self, uv: str, log: Path, *what: str) -> None:
        run([uv, "pip", "install", "-q", "--python", str(self.python), *what], log=log)

    def _digest(self, file: Path) -> str:
        parts = [str(self.path).encode(), self.extra.encode(), file.read_bytes()]  # a venv cannot be moved
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def _stamp(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except OSError:
            return ""


def control_environment(layout: Layout) -> Environment:
    """Return the control environment as the checkout wants it."""
    top = layout.repository
    # Entry points are read when the package is installed; the settings of the tools below do not matter.
    project = (top / "pyproject.toml").read_text().partition("\n[tool.ruff]")[0]
    return Environment(layout.control, top / "requirements.txt", top / "requirements-dev.txt", project)


def node_environment(layout: Layout, *, mpi: bool = False) -> Environment:
    """Return the node environment as the checkout wants it.

    :param mpi: the one whose Horovod meets over MPI too.
    """
    top = layout.repository
    requirements, path = top / "requirements-node.txt", layout.node_mpi if mpi else layout.node
    return Environment(path, requirements, top / "requirements-node-dev.txt", horovod.cache_key(requirements, mpi=mpi))


def ensure(repository: Path, *, dev: bool, steps: Steps, before_rebuild: Callable[[], None]) -> None:
    """Make what is not there or not up to date.

    :param before_rebuild: called before an environment is replaced that processes may still run in.
    :raises StepFailed: something is missing on this machine, or a step failed.
    """
    layout = Layout(repository)
    control, node = control_environment(layout), node_environment(layout)
    if all(item.has_tools() if dev else item.ready() for item in (control, node)):
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
    if not (control.ready() and node.ready()):
        before_rebuild()
    _make_both(control, node, uv, layout, wheel, steps)
    for item in (control, node):
        if dev and not item.has_tools():
            with steps.step(f"Tools for tests in {item.path.name}"):
                item.add_tools(uv, layout.log)


def _make_both(
    control: Environment, node: Environment, uv: str, layout: Layout, wheel: Path | None, steps: Steps
) -> None:
    python = host.find_python() or "3.11"  # else uv brings one
    if not control.ready():
        with steps.step("Control environment (Airflow, MLflow)"):
            control.make(uv, python, layout.log)
            control.install_package(uv, layout.log, layout.repository)
            control.finish()
    if not node.ready():
        _make_node(node, uv, layout, wheel, steps, mpi=False)


def _make_node(node: Environment, uv: str, layout: Layout, wheel: Path | None, steps: Steps, *, mpi: bool) -> None:
    python, with_mpi = host.find_python() or "3.11", " with MPI" if mpi else ""
    if wheel is None:
        with steps.step(f"Build Horovod{with_mpi} (once per machine)", lambda: horovod.build_progress(layout.log)):
            wheel = horovod.build_wheel(uv, python, node.requirements, layout.log, mpi=mpi)
    with steps.step(f"Node environment (MXNet, Horovod{with_mpi})"):
        node.make(uv, python, layout.log, str(wheel))
        check = f"import horovod.mxnet as hvd; assert hvd.gloo_built() and bool(hvd.mpi_built()) is {mpi}"
        run([str(node.python), "-c", check], log=layout.log)
        node.finish()


def ensure_mpi(repository: Path, *, steps: Steps) -> None:
    """Make the node environment whose Horovod meets over MPI too, with the tests' tools, unless it is up to date.

    :raises StepFailed: something is missing on this machine (Open MPI, for one), or a step failed.
    """
    layout = Layout(repository)
    node = node_environment(layout, mpi=True)
    if node.has_tools():
        return
    layout.home.mkdir(exist_ok=True)
    wheel = horovod.cached_wheel(node.requirements, mpi=True)
    uv = layout.find_uv()
    found = host.missing(layout.home, compiler=wheel is None and not node.ready(), uv=uv) + host.missing_mpi()
    if found:
        raise StepFailed(host.report(found))
    if uv is None:
        with steps.step("Bring uv"):
            uv = _bring_uv(layout)
    if not node.ready():
        _make_node(node, uv, layout, wheel, steps, mpi=True)
    with steps.step(f"Tools for tests in {node.path.name}"):
        node.add_tools(uv, layout.log)


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
    pinned = {"": [], "-docker": control, "-dev": control}  # the tools name what the control image has
    pinned |= {"-node": [], "-node-dev": node, "-horovod": node, "-node-cu112": []}
    for name, constraints in pinned.items():
        files = [f"requirements{name}.in", "-o", f"requirements{name}.txt"]
        subprocess.run([*command, *files, *constraints], cwd=repository, check=True, env=os.environ)
