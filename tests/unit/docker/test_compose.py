"""docker/compose.yaml: valid, nothing dangling, loopback only; and what it says works with the real programs."""

from __future__ import annotations

import http.client
import importlib.resources
import io
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker_env
import jsonschema
import pytest
import yaml
from dotenv import dotenv_values

from mxdist.hooks.cluster import AwsExtras, ClusterSettings
from mxdist.hooks.mlflow import MlflowExtras
from stack.ports import free_ports
from stack.processes import wait_until
from support.dockerfile import FILES, REPOSITORY, stages
from support.places import control_bin

DOCKER = REPOSITORY / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = sorted(name for name, service in SERVICES.items() if "build" in service)
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|_KEY|DATABASE_URL|BROKER_URL|CONN\b|STORE_URI")
each = pytest.mark.parametrize("name", sorted(SERVICES))


def interpolated(text: str, environment: dict[str, str] | None = None) -> str:
    """Return a text as compose reads it."""
    known = environment or {}
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: known.get(found[1], found[2]), text)
    assert "${" not in text
    return text.replace("$$", "$")


def secrets_of(name: str) -> dict[str, str]:
    """Return which secret lies at which path of a service's containers."""
    found = {}
    for entry in SERVICES[name].get("secrets", []):
        source, target = (entry, entry) if isinstance(entry, str) else (entry["source"], entry["target"])
        found[target if target.startswith("/") else f"/run/secrets/{target}"] = source
    return found


def texts(name: str) -> str:
    """Return command, health check and environment of a service in one text."""
    service = SERVICES[name]
    return json.dumps([service.get(key) for key in ("command", "healthcheck", "environment")])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What docker/.env holds, read by a reader of others."""
    path = tmp_path_factory.mktemp("env") / ".env"
    assert docker_env.write(path)
    return {name: value or "" for name, value in dotenv_values(path).items()}


def test_it_fits_the_schema_of_the_compose_specification() -> None:
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(vendored.read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    broken = {**COMPOSE, "services": {"x": {"imagee": "y"}}}
    assert list(validator.iter_errors(broken))


def test_all_parts_of_a_site_are_there() -> None:
    airflow = {
        f"airflow-{part}" for part in ("api-server", "dag-processor", "init", "scheduler", "triggerer", "worker")
    }
    assert set(SERVICES) == airflow | {"mlflow", "node1", "node2", "postgres", "redis", "seaweedfs"}


@each
def test_images_have_versions_and_no_root(name: str) -> None:
    service = SERVICES[name]
    assert re.search(r":\d+\.\d+(\.\d+)?(-[a-z]+)?$", service["image"])
    if name in OURS:
        build = service["build"]
        assert (DOCKER / build["context"]).resolve() == REPOSITORY
        assert REPOSITORY / build["dockerfile"] in FILES
    else:
        assert service["user"] == name
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert service.get("network_mode") is None


def test_one_image_is_built_in_one_way() -> None:
    ways = {(SERVICES[name]["image"], SERVICES[name]["build"]["dockerfile"]) for name in OURS}
    assert len(ways) == len({image for image, _ in ways}) == 2


@each
def test_ports_are_published_on_loopback_only(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", interpolated(port))


def test_published_ports_differ() -> None:
    ports = [interpolated(port).split(":")[1] for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == len(set(ports)) == 3


@each
def test_every_service_says_whether_it_is_healthy(name: str) -> None:
    if name != "airflow-init":
        assert SERVICES[name]["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


@each
def test_whom_a_service_waits_for_exists_and_can_answer(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        expected = "service_completed_successfully" if other == "airflow-init" else "service_healthy"
        assert how == {"condition": expected}
        assert other == "airflow-init" or "healthcheck" in SERVICES[other]


@each
def test_volumes_are_known_and_mounted_where_the_user_may_write(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            assert (DOCKER / source).exists()
            assert mode == ["ro"]
            continue
        assert source in COMPOSE["volumes"]
        if name in OURS and mode != ["ro"]:
            last = stages(REPOSITORY / SERVICES[name]["build"]["dockerfile"])[-1]
            (made,) = [command for command in last.runs() if "install -d -o mxdist" in command]
            assert re.search(rf"{target}(\s|$)", made), f"{target} would belong to root"


def test_no_volume_is_without_a_user() -> None:
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert set(COMPOSE["volumes"]) <= used


def test_every_secret_has_a_value_and_a_reader(environment: dict[str, str]) -> None:
    declared = {name: entry["environment"] for name, entry in COMPOSE["secrets"].items()}
    assert sorted(declared.values()) == sorted(environment)
    assert all(environment.values())
    assert set(declared) == {secret for name in SERVICES for secret in secrets_of(name).values()}


@each
def test_a_service_has_the_secrets_that_it_reads(name: str) -> None:
    read = set(re.findall(r"/run/secrets/[\w.]+", texts(name)))
    assert read <= set(secrets_of(name))


@each
def test_no_secret_stands_in_the_settings(name: str) -> None:
    for key, value in SERVICES[name].get("environment", {}).items():
        if SECRET.search(key) and "__SECRETS__" not in key:  # that section says where connections are
            assert "/run/secrets/" in value or key.endswith("PASSWORDS_FILE"), key


@each
def test_names_of_hosts_are_services(name: str) -> None:
    for url in re.findall(r"https?://[\w.-]+", interpolated(texts(name))):
        assert urlsplit(url).hostname in {*SERVICES, "localhost", "127.0.0.1"}


def test_addresses_among_the_secrets_are_services(environment: dict[str, str]) -> None:
    for name in ("MLFLOW_DATABASE_URL", "AIRFLOW_DATABASE_URL", "AIRFLOW_RESULT_BACKEND", "AIRFLOW_BROKER_URL"):
        host = urlsplit(environment[name]).hostname
        assert host in ("postgres", "redis")
        assert host in SERVICES
    assert urlsplit(environment["AIRFLOW_BROKER_URL"]).password == environment["REDIS_PASSWORD"]
    assert urlsplit(environment["MLFLOW_DATABASE_URL"]).password == environment["POSTGRES_PASSWORD"]


def test_connections_lead_to_the_services(environment: dict[str, str]) -> None:
    connections = json.loads(environment["AIRFLOW_CONNECTIONS"])
    cluster = ClusterSettings.model_validate(connections["mxdist_default"]["extra"])
    assert cluster.aws_conn_id in connections
    assert cluster.node_python is not None
    assert f"COPY --from=build {Path(cluster.node_python).parents[1]} " in FILES[1].read_text()
    aws = AwsExtras.model_validate(connections["aws_default"]["extra"])
    MlflowExtras.model_validate(connections["mxdist_mlflow"]["extra"])
    for url in (aws.endpoint_url, connections["mxdist_mlflow"]["host"]):
        assert url is not None
        assert urlsplit(url).hostname in SERVICES


def test_values_are_private_random_and_kept(tmp_path: Path, environment: dict[str, str]) -> None:
    path = tmp_path / ".env"
    old = os.umask(0)
    try:
        assert docker_env.write(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert not docker_env.write(path)
    assert path.read_text() == text
    assert [name for name, value in dotenv_values(stream=io.StringIO(text)).items() if value == environment[name]] == []
    assert "docker/.env" in (REPOSITORY / ".gitignore").read_text().splitlines()


def test_the_private_key_survives_the_file(tmp_path: Path, environment: dict[str, str]) -> None:
    key = tmp_path / "key"
    key.write_text(environment["SSH_PRIVATE_KEY"])
    key.chmod(0o600)
    done = subprocess.run(["ssh-keygen", "-y", "-f", key], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == environment["SSH_PUBLIC_KEY"].split()[:2]


def answer(port: int, host: str) -> int:
    """Return MLflow's status for a search under this host name; 0 if nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Host": host, "Content-Type": "application/json"}
    try:
        connection.request("POST", "/api/2.0/mlflow/experiments/search", '{"max_results": 1}', headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def test_mlflow_answers_to_the_names_that_others_call_it_by(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    replaced = {"--host": "127.0.0.1", "--port": str(port), "--artifacts-destination": str(tmp_path / "artifacts")}
    words = [interpolated(word).partition("=") for word in SERVICES["mlflow"]["command"]]
    options = [f"{name}{equals}{replaced.get(name, value)}" for name, equals, value in words if name != "--app-name"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    settings = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "log").open("wb") as log:
        command = [str(control_bin() / options[0]), *options[1:], *store]
        server = subprocess.Popen(command, env=settings, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        assert wait_until(lambda: answer(port, "mlflow:5000") == 200, 240), (tmp_path / "log").read_text()
        assert answer(port, "localhost:5000") == 200
        assert answer(port, "127.0.0.1:5000") == 200
        assert answer(port, "elsewhere:5000") == 403
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def test_with_secrets_hands_a_command_the_content_of_files(tmp_path: Path) -> None:
    value = "a 'b' $c\nd"
    (tmp_path / "x").write_text(value)
    settings = {"PATH": os.environ["PATH"], "FROM_FILE__MXDIST_X": str(tmp_path / "x")}
    program = DOCKER / "with-secrets"
    command = [str(program), sys.executable, "-c", "import os; print(os.environ['MXDIST_X'], end='')"]
    assert subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout == value
    settings["FROM_FILE__MXDIST_X"] = str(tmp_path / "missing")
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FROM_FILE__MXDIST_X: cannot read" in done.stderr
