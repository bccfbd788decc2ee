"""The relay of the kill matrix does to its callers what it says."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.relay import Mood, Relay


class _Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def relay() -> Iterator[Relay]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hello)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    with Relay(server.server_address[1]) as found:
        yield found
    server.shutdown()
    server.server_close()
    thread.join()


def _get(relay: Relay, timeout_s: float = 20) -> bytes:
    with urllib.request.urlopen(relay.url, timeout=timeout_s) as answer:  # noqa: S310 - ours, on loopback
        found: bytes = answer.read()
    return found


def test_it_passes_slowly_or_not(relay: Relay) -> None:
    for mood in (Mood.PASS, Mood.SLOW, Mood.PASS):
        relay.feel(mood)
        assert _get(relay) == b"hello"


def test_refused_and_back_on_the_same_port_that_nobody_else_gets(relay: Relay) -> None:
    for _ in range(3):
        relay.feel(Mood.REFUSED)
        with pytest.raises(urllib.error.URLError, match="refused"):
            _get(relay)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", relay.port))
        relay.feel(Mood.PASS)
        assert _get(relay) == b"hello"


def test_errors_and_black_hole(relay: Relay) -> None:
    relay.feel(Mood.ERRORS)
    with pytest.raises(urllib.error.HTTPError, match="500") as caught:
        _get(relay)
    caught.value.close()
    relay.feel(Mood.BLACK_HOLE)
    with pytest.raises(TimeoutError):
        _get(relay, timeout_s=1)
    relay.feel(Mood.PASS)
    assert _get(relay) == b"hello"
