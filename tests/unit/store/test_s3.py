"""What S3 alone can do wrong."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import StoreError
from mxdist.store import Credentials, open_store


def test_a_wrong_secret_is_said_and_not_retried(seaweed: Any) -> None:
    wrong = Credentials(seaweed.access_key, "not the secret")
    store = open_store(f"s3://{seaweed.make_bucket()}/x", endpoint_url=seaweed.endpoint_url, credentials=wrong)
    for call in (lambda: store.read("k"), lambda: store.write("k", b""), lambda: list(store.list())):
        with pytest.raises(StoreError, match="refused the credentials") as caught:
            call()
        assert not caught.value.retryable
        assert "not the secret" not in str(caught.value)


def test_missing_credentials_are_not_refused_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store("s3://bucket/x", endpoint_url="http://127.0.0.1:9")
    with pytest.raises(StoreError, match="there are no credentials for http://127.0.0.1:9. Set AWS_ACCESS_KEY_ID"):
        store.read("k")


def test_a_missing_bucket_is_named(seaweed: Any) -> None:
    store = open_store(
        "s3://no-such-bucket/x",
        endpoint_url=seaweed.endpoint_url,
        credentials=Credentials.from_environment(seaweed.credentials),
    )
    with pytest.raises(StoreError, match="no-such-bucket"):
        list(store.list())


def test_a_server_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    store = open_store("s3://bucket/x", endpoint_url=f"http://127.0.0.1:{port}", credentials=Credentials("a", "b"))
    with pytest.raises(StoreError, match=f"http://127.0.0.1:{port} did not answer") as caught:
        store.read("k")
    assert caught.value.retryable


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(Credentials("key", "hunter2", "hunter2-token"))
