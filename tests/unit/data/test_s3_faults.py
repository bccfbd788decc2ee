"""What S3 does wrong reaches the user as one clear message, and publishes nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.data.conftest import Place
from unit.data.spy import Requests

from mxdist.errors import StoreError
from mxdist.store import Credentials

Fill = Callable[..., Path]


def test_a_wrong_password_is_said(s3: Place, fill: Fill, tmp_path: Path) -> None:
    staged = s3.stage(fill({"a": b"1"}))
    before = s3.keys()
    wrong = Place(s3.uri, s3.endpoint_url, Credentials("mxdist-test", "not the secret"))
    for call in (
        lambda: wrong.stage(fill({"a": b"2"}, "other")),
        lambda: wrong.fetch(staged, tmp_path / "cache"),
        lambda: wrong.prune(keep=1),
    ):
        with pytest.raises(StoreError, match="refused the credentials") as caught:
            call()
        assert not caught.value.retryable
        assert "not the secret" not in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    assert s3.keys() == before


def test_a_missing_bucket_is_said(s3: Place, fill: Fill, tmp_path: Path) -> None:
    lost = Place("s3://no-such-bucket/data", s3.endpoint_url, s3.credentials)
    version = "0" * 64
    named = {"version": version, "manifest_uri": f"s3://no-such-bucket/data/x/manifests/{version}.json"}
    for call in (lambda: lost.stage(fill({"a": b"1"})), lambda: lost.fetch(named, tmp_path / "cache")):
        with pytest.raises(StoreError, match="no-such-bucket") as caught:
            call()
        assert not caught.value.retryable


def test_a_server_that_is_down_is_said(fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        down = Place("s3://bucket/data", f"http://127.0.0.1:{port}", Credentials("a", "b"))
        version = "0" * 64
        named = {"version": version, "manifest_uri": f"s3://bucket/data/x/manifests/{version}.json"}
        for call in (lambda: down.stage(fill({"a": b"1"})), lambda: down.fetch(named, tmp_path / "cache")):
            with pytest.raises(StoreError, match=f"http://127.0.0.1:{port} did not answer") as caught:
                call()
            assert caught.value.retryable


def test_a_server_that_dies_while_data_are_sent_leaves_nothing_visible(
    s3: Place, fill: Fill, seaweed: Any, monkeypatch: pytest.MonkeyPatch, requests: Requests
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    source = fill({f"{number}": b"%d" % number for number in range(300)})
    note = requests.note

    def note_and_kill(request: Any, **more: Any) -> None:
        note(request, **more)
        if len(requests.paths("PUT", "/blobs/")) == 100:
            seaweed.kill()

    monkeypatch.setattr(requests, "note", note_and_kill)
    with pytest.raises(StoreError, match="did not answer"):
        s3.stage(source)
    assert requests.paths("PUT", "/manifests/") == []
    seaweed.start()
    assert s3.keys(prefix="manifests/") == s3.keys(prefix="history/") == []
    there = len(s3.keys(prefix="blobs/"))
    assert there <= 300
    assert s3.stage(source)["uploaded_files"] == 300 - there


def test_no_checksum_trailers_are_sent(s3: Place, fill: Fill, requests: Requests) -> None:
    """Some servers store the trailer inside the object, others refuse it: boto/boto3#4401, #4409, #4435."""
    s3.stage(fill({"empty": b"", "one": b"1", "nine": bytes(9 << 20), "parts": bytes(70 << 20)}))
    sent = [headers for (method, _), headers in zip(requests.seen, requests.headers, strict=True) if method == "PUT"]
    assert len(sent) >= 4
    for headers in sent:
        assert "x-amz-trailer" not in headers
        assert "aws-chunked" not in headers.get("content-encoding", "")
        assert not [name for name in headers if name.startswith("x-amz-checksum-") or "sdk-checksum" in name]
