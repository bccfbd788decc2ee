"""Connections: what is taken from them, what is refused, and that they can be tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxdist.errors import SpecError
from mxdist.hooks.cluster import ClusterHook
from mxdist.hooks.mlflow import MlflowHook
from mxdist.provider import get_provider_info
from stack.mlflow import Mlflow
from stack.seaweed import Seaweed


def connect(monkeypatch: pytest.MonkeyPatch, name: str, **fields: object) -> None:
    monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps(fields))


def test_reads_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {
        "runs_uri": "s3://b/runs",
        "data_uri": "s3://b/data",
        "node_python": "/node/python",
        "workdir": "/scratch",
        "endpoint_url": "http://127.0.0.1:1",
        "region": "eu-1",
    }
    connect(monkeypatch, "MXDIST_DEFAULT", conn_type="mxdist", login="key", password="secret", extra=extra)
    hook = ClusterHook()
    assert hook.settings.model_dump(exclude_none=True) == extra
    assert hook.secrets() == {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    assert hook.runs().uri == "s3://b/runs"


def test_keys_of_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"runs_uri": "s3://b/runs", "aws_conn_id": "aws_default"}
    connect(monkeypatch, "MXDIST_DEFAULT", conn_type="mxdist", extra=extra)
    aws = {"aws_session_token": "token", "region_name": "eu-2", "endpoint_url": "http://127.0.0.1:2"}
    connect(monkeypatch, "AWS_DEFAULT", conn_type="aws", login="key", password="secret", extra=aws)
    hook = ClusterHook()
    assert hook.secrets() == {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_SESSION_TOKEN": "token",
    }
    assert (hook.settings.endpoint_url, hook.settings.region) == ("http://127.0.0.1:2", "eu-2")


def test_empty_fields_of_the_form_count_as_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"runs_uri": "/runs", "region": "", "endpoint_url": None, "aws_conn_id": ""}
    connect(monkeypatch, "MXDIST_DEFAULT", conn_type="mxdist", extra=extra)
    hook = ClusterHook()
    assert (hook.settings.region, hook.settings.endpoint_url, hook.secrets()) == (None, None, {})


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"runs_uri": "/runs", "config_kwargs": {"x": 1}}, "extra.config_kwargs"), ({"region": "eu"}, "runs_uri")],
    ids=["unknown extra", "missing run store"],
)
def test_refuses_other_extras_by_name(monkeypatch: pytest.MonkeyPatch, extra: dict[str, object], named: str) -> None:
    connect(monkeypatch, "MXDIST_DEFAULT", conn_type="mxdist", extra=extra)
    with pytest.raises(SpecError, match=named):
        _ = ClusterHook().settings


def test_refuses_what_it_cannot_do_with_an_aws_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(
        monkeypatch,
        "MXDIST_DEFAULT",
        conn_type="mxdist",
        extra={"runs_uri": "s3://bbb/r", "aws_conn_id": "aws_default"},
    )
    connect(monkeypatch, "AWS_DEFAULT", conn_type="aws", extra={"role_arn": "arn:aws:iam::1:role/r"})
    with pytest.raises(SpecError, match=r"extra\.role_arn: is not taken"):
        _ = ClusterHook().credentials


def test_staging_needs_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, "MXDIST_DEFAULT", conn_type="mxdist", extra={"runs_uri": "/runs"})
    with pytest.raises(SpecError, match="data_uri"):
        ClusterHook().data_uri()


def test_cluster_connection_can_be_tested(
    monkeypatch: pytest.MonkeyPatch, seaweed: Seaweed, bucket: str, tmp_path: Path
) -> None:
    extra = {"runs_uri": f"s3://{bucket}/runs", "endpoint_url": seaweed.endpoint_url}
    secret = seaweed.credentials["AWS_SECRET_ACCESS_KEY"]
    connect(monkeypatch, "MXDIST_DEFAULT", conn_type="mxdist", login=seaweed.access_key, password=secret, extra=extra)
    assert ClusterHook().test_connection() == (True, f"The run store s3://{bucket}/runs answers.")
    connect(monkeypatch, "MXDIST_DEFAULT", conn_type="mxdist", login=seaweed.access_key, password="wrong", extra=extra)
    works, message = ClusterHook().test_connection()
    assert not works
    assert "refused the credentials" in message
    assert "wrong" not in message


@pytest.mark.parametrize(
    ("fields", "uri"),
    [
        ({"host": "http://127.0.0.1:5000"}, "http://127.0.0.1:5000"),
        ({"host": "http://127.0.0.1:5000/"}, "http://127.0.0.1:5000"),
        ({"host": "mlflow", "port": 5000}, "http://mlflow:5000"),
        ({"host": "mlflow", "schema": "https"}, "https://mlflow"),
        ({"host": "https://mlflow.example/path"}, "https://mlflow.example/path"),
        ({"host": "http://mlflow", "port": 5000}, "http://mlflow:5000"),
    ],
    ids=["url", "slash", "host and port", "scheme", "path", "url and port"],
)
def test_mlflow_address(monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], uri: str) -> None:
    connect(monkeypatch, "MXDIST_MLFLOW", conn_type="mxdist_mlflow", **fields)
    assert MlflowHook().uri == uri
    assert MlflowHook().ui_url == uri


def test_mlflow_needs_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, "MXDIST_MLFLOW", conn_type="mxdist_mlflow")
    with pytest.raises(SpecError, match="host"):
        _ = MlflowHook().uri


@pytest.mark.parametrize(
    ("fields", "secrets"),
    [
        ({}, {}),
        ({"password": "t"}, {"MLFLOW_TRACKING_TOKEN": "t"}),
        ({"login": "u", "password": "p"}, {"MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "p"}),
    ],
    ids=["open", "token", "user"],
)
def test_mlflow_log_in(monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], secrets: dict[str, str]) -> None:
    connect(monkeypatch, "MXDIST_MLFLOW", conn_type="mxdist_mlflow", host="http://h", **fields)
    assert MlflowHook().secrets() == secrets


def test_mlflow_connection_can_be_tested(monkeypatch: pytest.MonkeyPatch, secured_mlflow: Mlflow) -> None:
    login = secured_mlflow.credentials["MLFLOW_TRACKING_USERNAME"]
    password = secured_mlflow.credentials["MLFLOW_TRACKING_PASSWORD"]
    good = {"conn_type": "mxdist_mlflow", "host": secured_mlflow.url, "login": login}
    connect(monkeypatch, "MXDIST_MLFLOW", password=password, **good)
    assert MlflowHook().test_connection() == (True, f"MLflow at {secured_mlflow.url} answers.")
    connect(monkeypatch, "MXDIST_MLFLOW", password="wrong", **good)
    works, message = MlflowHook().test_connection()
    assert not works
    assert "refused the login" in message


def test_form_has_exactly_the_extras_that_are_taken() -> None:
    from mxdist.hooks.cluster import ClusterSettings
    from mxdist.hooks.mlflow import MlflowExtras

    forms = {one["connection-type"]: set(one["conn-fields"]) for one in get_provider_info()["connection-types"]}
    assert forms["mxdist"] == set(ClusterSettings.model_fields)
    assert forms["mxdist_mlflow"] == set(MlflowExtras.model_fields)
