"""What the images of docker/ install, installed: from the same lines, into a folder of its own."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import docker_env
import pytest
import yaml
from dotenv import dotenv_values

from support.dockerfile import REPOSITORY
from support.image import Image, build

COMPOSE: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())

VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The control image."""
    return build(REPOSITORY / "docker/control.Dockerfile", tmp_path_factory.mktemp("control"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The node image without GPU."""
    return build(REPOSITORY / "docker/node-cpu.Dockerfile", tmp_path_factory.mktemp("node"))


def pinned(name: str) -> dict[str, str]:
    """Return the versions of a requirements file."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (REPOSITORY / name).read_text(), re.MULTILINE))


def installed(image: Image) -> dict[str, str]:
    """Return the versions that an image has."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found: dict[str, str] = json.loads(image.run("python", "-c", code))
    return {re.sub(r"[-_.]+", "-", name).lower(): number for name, number in found.items()}


def test_control_image_has_what_is_pinned_and_no_mxnet(control: Image) -> None:
    expected = {**pinned("requirements.txt"), **pinned("requirements-docker.txt"), "mxdist": VERSION}
    assert installed(control) == expected


def test_node_image_has_what_is_pinned_and_no_airflow(node: Image) -> None:
    assert installed(node) == {**pinned("requirements-node.txt"), "horovod": "0.28.1", "mxdist": VERSION}


def test_only_the_system_s_packages_and_users_are_left_out(control: Image, node: Image) -> None:
    kinds = {command.split()[0] for command in control.left_out + node.left_out}
    assert kinds == {"apt-get", "rm", "useradd", "install"}


def test_node_image_runs_mxdist_and_horovod(node: Image) -> None:
    assert "TrainingJob" in json.loads(node.run("mxdist", "schema"))["$defs"]
    code = "import horovod.mxnet as hvd; hvd.init(); print(hvd.size(), hvd.gloo_built(), hvd.mpi_built())"
    assert node.run("python", "-c", code).split() == ["1", "True", "False"]


def test_every_command_of_the_compose_file_is_in_the_image(control: Image) -> None:
    services = [one for one in COMPOSE["services"].values() if one["image"].startswith("mxdist-control")]
    programs = {one["command"][0] for one in services}
    assert programs == {"airflow", "mlflow", "weed"}
    for program in [*programs, "celery"]:
        assert (control.root / "opt/control/bin" / program).exists()


READ = """if True:
    import json
    from airflow.sdk.configuration import conf
    from airflow.sdk.execution_time.supervisor import ensure_secrets_backend_loaded
    from airflow.configuration import conf as core
    from airflow.providers.celery.executors.celery_executor import app
    found = [one for one in ensure_secrets_backend_loaded() if "LocalFilesystem" in type(one).__name__]
    connection = found[0].get_connection("mxdist_mlflow")
    urls = [core.get("database", "sql_alchemy_conn"), app.conf.broker_url, app.conf.result_backend]
    print(json.dumps([connection.host, connection.password, core.get("api_auth", "jwt_secret"), *urls]))
"""


def test_airflow_reads_connections_and_settings_from_the_secrets(control: Image, tmp_path: Path) -> None:
    assert docker_env.write(tmp_path / ".env")
    values = {name: value or "" for name, value in dotenv_values(tmp_path / ".env").items()}
    service = COMPOSE["services"]["airflow-worker"]
    for entry in service["secrets"]:
        source, target = (entry, entry) if isinstance(entry, str) else (entry["source"], entry["target"])
        (tmp_path / target).write_text(values[COMPOSE["secrets"][source]["environment"]])
    settings = {name: text.replace("/run/secrets/", f"{tmp_path}/") for name, text in service["environment"].items()}
    settings |= {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path)}
    read = json.loads(control.run("python", "-c", READ, **settings).splitlines()[-1])
    names = ["MLFLOW_PASSWORD", "AIRFLOW_JWT_SECRET", "AIRFLOW_DATABASE_URL"]
    names += ["AIRFLOW_BROKER_URL", "AIRFLOW_RESULT_BACKEND"]
    assert read == ["http://mlflow:5000", *(values[name] for name in names)]


def test_a_wheel_is_built_for_an_mxnet_that_is_named() -> None:
    missing = ["python3.11", "scripts/horovod_wheel.py", "--into", "x"]
    done = subprocess.run(missing, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--requirements" in done.stderr
