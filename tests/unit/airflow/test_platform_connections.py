"""Connections to platforms: what a job takes from them, what stays secret, and that they can be tested for real."""

from __future__ import annotations

import getpass
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.airflow.world import context_of

from mxdist.errors import SpecError
from mxdist.hooks.cluster import ClusterHook
from mxdist.hooks.platforms import check_platform
from mxdist.hooks.ssh import SlurmExtras, SlurmHook, SshExtras, SshHook
from mxdist.launch.kubernetes import KubernetesLauncher
from mxdist.launch.ssh import SshLauncher
from mxdist.operators.train import DistributedTrainOperator
from mxdist.provider import get_provider_info
from mxdist.spec.cluster import Cluster
from support.sshd import Sshd, keygen, sshd

KNOWN = "node1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZha2VmYWtlZmFrZWZha2VmYWtlZmFrZWZha2VmYWtl"


def connect(monkeypatch: pytest.MonkeyPatch, name: str, **fields: object) -> None:
    monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(fields))


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ClusterHook:
    """A connection whose jobs run where ``gpu_hosts`` says."""
    extra = {"runs_uri": "s3://b/runs", "node_python": "/node/python", "cluster_conn_id": "gpu_hosts"}
    connect(monkeypatch, "mxdist_default", conn_type="mxdist", extra=extra)
    extra = {"hosts": "node[1-2]:2\n# spare\nbig slots=4\n", "private_key": "canary-key", "known_hosts": KNOWN}
    connect(
        monkeypatch, "gpu_hosts", conn_type="mxdist_ssh", login="trainer", port=2222, password="canary-phrase",
        extra=extra,
    )  # fmt: skip
    connect(monkeypatch, "k8s", conn_type="kubernetes", extra={"namespace": "training", "in_cluster": False})
    connect(monkeypatch, "slurm", conn_type="mxdist_slurm", host="ada@head", port=2022, extra={"known_hosts": KNOWN})
    return ClusterHook()


def test_job_takes_the_hosts_of_the_connection_but_no_secret(hook: ClusterHook, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    operator = DistributedTrainOperator(task_id="t", script=str(script), world_size=8, mlflow_conn_id=None)
    job = operator.build_job(context_of(operator))
    assert [(host.name, host.slots) for host in job.cluster.inventory] == [("node1", 2), ("node2", 2), ("big", 4)]
    assert (job.cluster.connection, job.cluster.ssh.user, job.cluster.ssh.port) == ("gpu_hosts", "trainer", 2222)
    assert (job.cluster.python, job.cluster.ssh.known_hosts) == ("/node/python", (KNOWN,))
    assert "canary" not in json.dumps(job.to_document())


def test_task_says_more_or_another_connection_or_none(hook: ClusterHook) -> None:
    own = hook.cluster_fields({"hosts": ["one"], "ssh": {"user": "me"}, "kind": "ssh"})
    assert (own["hosts"], own["ssh"]["user"], own["ssh"]["port"]) == (["one"], "me", 2222)
    kubernetes = hook.cluster_fields({"connection": "k8s", "kubernetes": {"image": "node:1"}})
    assert kubernetes["kubernetes"] == {"namespace": "training", "image": "node:1"}
    assert (kubernetes["kind"], kubernetes["connection"]) == ("kubernetes", "k8s")
    assert hook.cluster_fields({"connection": "slurm"})["kind"] == "slurm"
    assert hook.cluster_fields({"kind": "local"}) == {"python": "/node/python", "workdir": None, "kind": "local"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"kind": "slurm"},
            "Connection 'gpu_hosts' has 1 problem:\n  conn_type: is 'mxdist_ssh'; it must be mxdist_slurm",
        ),
        ({"connection": "mxdist_default"}, "it must be mxdist_ssh or mxdist_slurm or kubernetes"),
    ],
    ids=["other platform", "other type"],
)
def test_connection_of_another_type_is_refused(hook: ClusterHook, given: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as raised:
        hook.cluster_fields(given)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"conn_type": "mxdist_ssh", "extra": {"hosts": "a", "no_host_key_check": True}}, "extra.no_host_key_check"),
        ({"conn_type": "mxdist_ssh", "port": 99999, "extra": {"hosts": "a"}}, "port"),
        ({"conn_type": "mxdist_ssh", "extra": {"hosts": "a", "known_hosts": "rubbish"}}, "known_hosts"),
        ({"conn_type": "mxdist_ssh", "extra": {"hosts": "a b=c"}}, "no setting"),
        ({"conn_type": "mxdist_ssh"}, "names no hosts"),
        ({"conn_type": "mxdist_slurm", "host": "a,b"}, "host: must be one host"),
        ({"conn_type": "mxdist_slurm", "extra": {"hosts": "a"}}, "extra.hosts"),
    ],
)
def test_wrong_fields_are_told_by_the_test_button(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], told: str
) -> None:
    connect(monkeypatch, "wrong", **fields)
    kind = SshHook if fields["conn_type"] == "mxdist_ssh" else SlurmHook
    good, message = kind("wrong").test_connection()
    assert (good, told in message) == (False, True), message


def test_key_and_passphrase_travel_in_the_access_alone(hook: ClusterHook) -> None:
    cluster = Cluster.parse(hook.cluster_fields({}))
    access = hook.platforms().ssh_access(cluster)
    assert (access.key, access.passphrase, access.user, access.port) == ("canary-key", "canary-phrase", "trainer", 2222)
    assert "canary" not in repr(access)


def test_each_connection_leads_to_its_launcher(hook: ClusterHook) -> None:
    platforms = hook.platforms()
    assert isinstance(platforms.of(Cluster.parse(hook.cluster_fields({}))), SshLauncher)
    image = {"connection": "k8s", "kubernetes": {"image": "node:1"}}
    assert isinstance(platforms.of(Cluster.parse(hook.cluster_fields(image))), KubernetesLauncher)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Sshd]:
    """An sshd on loopback."""
    with sshd(tmp_path / "sshd") as running:
        yield running


def door_fields(door: Sshd, **extra: str) -> dict[str, Any]:
    known = {"private_key": door.key.read_text(), "known_hosts": door.known_host}
    return {"conn_type": "mxdist_ssh", "login": getpass.getuser(), "port": door.port, "extra": {**known, **extra}}


def test_ssh_connection_can_be_tested(monkeypatch: pytest.MonkeyPatch, door: Sshd) -> None:
    connect(monkeypatch, "hosts", **door_fields(door, hosts="127.0.0.1"))
    assert SshHook("hosts").test_connection() == (True, "Logged in to 1 host: 127.0.0.1.")


def test_host_with_another_key_is_not_entered(monkeypatch: pytest.MonkeyPatch, door: Sshd, tmp_path: Path) -> None:
    other = keygen(tmp_path / "other").with_suffix(".pub").read_text().split()[:2]
    known = f"[127.0.0.1]:{door.port} {' '.join(other)}"
    connect(monkeypatch, "hosts", **door_fields(door, hosts="127.0.0.1", known_hosts=known))
    good, message = SshHook("hosts").test_connection()
    assert not good
    assert "127.0.0.1" in message
    assert "key" in message
    connect(monkeypatch, "hosts", **door_fields(door, hosts="127.0.0.1", private_key=(tmp_path / "other").read_text()))
    good, message = SshHook("hosts").test_connection()
    assert not good
    assert "PRIVATE KEY" not in message


def test_mxdist_connection_tests_its_platform_as_well(
    monkeypatch: pytest.MonkeyPatch, door: Sshd, tmp_path: Path
) -> None:
    extra = {"runs_uri": str(tmp_path / "runs"), "cluster_conn_id": "hosts"}
    connect(monkeypatch, "mxdist_default", conn_type="mxdist", extra=extra)
    connect(monkeypatch, "hosts", **door_fields(door, hosts="127.0.0.1"))
    assert ClusterHook().test_connection() == (
        True, f"The run store {tmp_path / 'runs'} answers. Logged in to 1 host: 127.0.0.1.",
    )  # fmt: skip
    connect(monkeypatch, "hosts", **door_fields(door, hosts="127.0.0.1 port=1"))
    good, message = ClusterHook().test_connection()
    assert not good
    assert "cannot reach 127.0.0.1" in message


SINFO = """#!/bin/sh
[ "$*" = "--noheader --format=%D|%T" ] || exit 9
printf '2|idle\\n1|down\\n'
"""


def test_slurm_is_asked_on_the_workers_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    connect(monkeypatch, "slurm", conn_type="mxdist_slurm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert SlurmHook("slurm").test_connection() == (
        False, "there is no sinfo on this host. Install slurm-client, or name a head node as the host.",
    )  # fmt: skip
    (tmp_path / "sinfo").write_text(SINFO)
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert SlurmHook("slurm").test_connection() == (True, "Slurm answers: 3 nodes (2 idle, 1 down).")


def test_slurm_is_asked_on_the_head_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sinfo").write_text(SINFO)
    (tmp_path / "sinfo").chmod(0o755)
    path = f"{tmp_path}:/bin:/usr/bin"
    with sshd(tmp_path / "sshd", options=[f"SetEnv PATH={path}"]) as door:
        fields = door_fields(door)
        connect(monkeypatch, "slurm", **{**fields, "conn_type": "mxdist_slurm", "host": "127.0.0.1"})
        told = SlurmHook("slurm").test_connection()
    assert told == (True, "Slurm answers on 127.0.0.1: 3 nodes (2 idle, 1 down).")


def test_platform_of_a_type_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, hook: ClusterHook) -> None:
    good, message = check_platform(hook.platform_connection("mxdist_default"))
    assert not good
    assert "must be mxdist_ssh or mxdist_slurm or kubernetes" in message


def test_kubernetes_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": {"token": "canary"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    connect(monkeypatch, "k8s", conn_type="kubernetes", extra={"kube_config": json.dumps(config)})
    good, message = check_platform(ClusterHook().platform_connection("k8s"))
    assert not good
    assert "canary" not in message
    assert message


def test_forms_have_exactly_the_extras_that_are_taken_and_hide_what_is_not_used() -> None:
    types = {one["connection-type"]: one for one in get_provider_info()["connection-types"]}
    assert set(types["mxdist_ssh"]["conn-fields"]) == set(SshExtras.model_fields)
    assert set(types["mxdist_slurm"]["conn-fields"]) == set(SlurmExtras.model_fields)
    for one in types.values():
        shown = {*one["conn-fields"], "host", "schema", "login", "password", "port"}
        assert set(one["ui-field-behaviour"]["hidden-fields"]) <= shown


def test_airflow_hides_the_private_key() -> None:
    from airflow._shared.secrets_masker import should_hide_value_for_key

    assert [name for name in SshExtras.model_fields if should_hide_value_for_key(name)] == ["private_key"]
