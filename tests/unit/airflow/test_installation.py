"""The package in Airflow's plugins folder, installed as a distribution, and both at once: never loaded twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.bare_control import bare_control, copy_of_plugins
from support.places import REPOSITORY

ALL_FILES = ("pyproject.toml", "README.md", "LICENSE")

LOADED = """
import json
from airflow.listeners.listener import get_listener_manager as core_listeners
from airflow.plugins_manager import _get_plugins
from airflow.providers_manager import ProvidersManager
from airflow.sdk.listener import get_listener_manager as task_listeners
from airflow.sdk.plugins_manager import _get_plugins as task_plugins

manager = ProvidersManager()
plugins, errors = _get_plugins()
count = lambda listeners: sum(plugin.__name__ == "mxdist.listeners" for plugin in listeners().pm.get_plugins())
print("LOADED " + json.dumps({
    "plugins": [plugin.name for plugin in plugins],
    "task_plugins": [plugin.name for plugin in task_plugins()[0]],
    "errors": errors,
    "core_listeners": count(core_listeners),
    "task_listeners": count(task_listeners),
    "provider": "mxdist" in manager.providers,
    "hooks": sorted(name for name in manager.hooks if name.startswith("mxdist")),
    "fields": sorted(name for name in manager.connection_form_widgets if name.startswith("extra__mxdist")),
    "behaviours": sorted(name for name in manager.field_behaviours if name.startswith("mxdist")),
}))
"""


@dataclass(frozen=True)
class Home:
    """An Airflow home with some way to the package."""

    python: Path
    environment: dict[str, str]

    def loaded(self) -> dict[str, Any]:
        """Return what Airflow has loaded."""
        lines = self._run([str(self.python), "-c", LOADED]).splitlines()
        found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("LOADED "))[7:])
        return found

    def command(self, *words: str) -> str:
        """Return what the real command line prints."""
        return self._run([str(self.python), "-m", "airflow", *words])

    def _run(self, command: list[str]) -> str:
        where = self.environment["HOME"]  # a checkout may hold an egg-info, and `-c` searches here
        done = subprocess.run(command, env=self.environment, cwd=where, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "already registered" not in done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with all that this one has, but for mxdist, which may be installed here."""
    return bare_control(tmp_path_factory.mktemp("python"), Path(sysconfig.get_path("purelib"))) / "python"


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugins folder of a checkout in which nothing was built."""
    return copy_of_plugins(tmp_path_factory.mktemp("checkout") / "plugins")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution in it, as pip would unpack its wheel."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ALL_FILES:
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, source / name)
    copy_of_plugins(source / "plugins")
    build = "import setuptools.build_meta as build, sys; print(build.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(target)]
    done = subprocess.run(command, cwd=source, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    with zipfile.ZipFile(target / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(target)
    return target


def home(tmp_path: Path, python: Path, *, plugins: Path | None, path: Path | None) -> Home:
    empty = tmp_path / "plugins"
    empty.mkdir()
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(plugins or empty),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return Home(python, environment | ({"PYTHONPATH": str(path)} if path else {}))


def once(loaded: dict[str, Any]) -> bool:
    """Return whether plugin and listeners are there exactly once, for Airflow and for its tasks."""
    names = [loaded[where].count("mxdist") for where in ("plugins", "task_plugins")]
    return [*names, loaded["core_listeners"], loaded["task_listeners"]] == [1, 1, 1, 1] and not loaded["errors"]


def test_plugins_folder_alone(tmp_path: Path, python: Path, plugins: Path) -> None:
    place = home(tmp_path, python, plugins=plugins, path=None)
    loaded = place.loaded()
    assert once(loaded), loaded
    assert loaded["provider"] is False  # connection types need the distribution
    listed = json.loads(place.command("plugins", "-o", "json"))
    assert [plugin["name"] for plugin in listed].count("mxdist") == 1


def test_installed_distribution(tmp_path: Path, python: Path, installed: Path) -> None:
    place = home(tmp_path, python, plugins=None, path=installed)
    loaded = place.loaded()
    assert once(loaded), loaded
    assert loaded["provider"] is True
    assert loaded["hooks"] == loaded["behaviours"] == ["mxdist", "mxdist_mlflow", "mxdist_slurm", "mxdist_ssh"]
    assert "extra__mxdist__runs_uri" in loaded["fields"]
    assert "extra__mxdist_mlflow__ui_url" in loaded["fields"]
    listed = json.loads(place.command("providers", "list", "-o", "json"))
    assert [provider["package_name"] for provider in listed].count("mxdist") == 1


def test_both_at_once(tmp_path: Path, python: Path, plugins: Path, installed: Path) -> None:
    place = home(tmp_path, python, plugins=plugins, path=installed)
    loaded = place.loaded()
    assert once(loaded), loaded
    assert loaded["provider"] is True
