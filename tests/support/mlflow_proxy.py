"""A relay in front of a real MLflow server that can behave as badly as networks and servers do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

Mood = Callable[[str, str], str]
"""From method and path to what happens: pass, 404, 500, hang (no answer), lose (done, but no answer)."""


class MlflowProxy:
    """Listens on a port of its own and relays to ``upstream``, as ``mood`` says for each request."""

    def __init__(self, upstream: str) -> None:
        self.mood: Mood = lambda method, path: "pass"
        self.seen: list[tuple[str, str]] = []
        self._upstream = urlsplit(upstream).netloc
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """Where the relay answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def always(self, mood: str) -> None:
        """From now on do this to every request."""
        self.mood = lambda method, path: mood

    def once(self, mood: str, ending: str) -> None:
        """Do this to the next request whose path ends so; all else passes."""
        left = [mood]
        self.mood = lambda method, path: left.pop() if left and path.endswith(ending) else "pass"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def relay(self) -> None:
                path = urlsplit(self.path).path
                proxy.seen.append((self.command, path))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                mood = proxy.mood(self.command, path)
                if mood == "pass":
                    return self.answer(*proxy._forward(self.command, self.path, body, dict(self.headers)))
                if mood in {"404", "500"}:
                    return self.answer(int(mood), b"no")
                if mood == "lose":
                    proxy._forward(self.command, self.path, body, dict(self.headers))
                else:
                    proxy._closing.wait()
                self.close_connection = True
                return None

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = relay

            def answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler

    def _forward(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        kept = {name: value for name, value in headers.items() if name.lower() not in {"host", "connection"}}
        try:
            connection.request(method, path, body, {**kept, "Host": self._upstream})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers.get("Content-Type", "text/plain")
        except OSError:
            return 502, b"the server is down", "text/plain"
        finally:
            connection.close()
