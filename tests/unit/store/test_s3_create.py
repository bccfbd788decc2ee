"""A create on S3 comes to an end, whatever the server says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mxdist.errors import StoreError
from mxdist.store import Credentials, open_store

Answer = tuple[int, str]
ABSENT: Answer = (404, "NoSuchKey")
PRESENT: Answer = (412, "PreconditionFailed")
RACING: Answer = (409, "ConditionalRequestConflict")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxdist.store.s3._CONFLICT_PAUSES_S", (0.0, 0.0, 0.0, 0.0))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


@contextmanager
def server(answer: Callable[[str, int], Answer]) -> Iterator[tuple[str, list[str]]]:
    """A server of S3's protocol that knows no object and answers as it is told; yields its URL and what it heard."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            heard.append(self.command)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, code = answer(self.command, heard.count(self.command))
            body = f"<Error><Code>{code}</Code></Error>".encode() if status != 200 else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = reply

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}", heard
        finally:
            http.shutdown()
            thread.join()


def create(url: str) -> bool:
    return open_store("s3://bucket/x", endpoint_url=url, credentials=Credentials("a", "b")).create("key", b"data")


@pytest.mark.parametrize("refusal", [PRESENT, RACING], ids=["present", "racing"])
def test_create_gives_up_on_a_server_that_contradicts_itself(refusal: Answer) -> None:
    with server(lambda method, _: refusal if method == "PUT" else ABSENT) as (url, heard):
        with pytest.raises(StoreError, match="says that it is there, and that it is not") as caught:
            create(url)
    assert caught.value.retryable
    assert heard == ["PUT", "GET"] * 4


def test_create_is_tried_again_when_the_winner_of_a_race_is_gone() -> None:
    with server(lambda method, count: ABSENT if method == "GET" else RACING if count < 3 else (200, "")) as (
        url,
        heard,
    ):
        assert create(url)
    assert heard == ["PUT", "GET", "PUT", "GET", "PUT"]
