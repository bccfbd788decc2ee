"""What was really asked of an S3 server: every request of every client, as it leaves the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Requests:
    """The requests so far, as ``(method, path)``, with their bodies' sizes and headers."""

    seen: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, request: Any, **_: Any) -> None:
        parts = urlsplit(request.url)
        with self._lock:
            self.seen.append((request.method, unquote(parts.path)))
            self.headers.append({key.lower(): str(value) for key, value in request.headers.items()})
            self.bodies.append(request.body if request.method == "POST" else None)

    def clear(self) -> None:
        self.seen.clear()
        self.headers.clear()
        self.bodies.clear()

    def paths(self, method: str, part: str = "") -> list[str]:
        return [path for verb, path in self.seen if verb == method and part in path]

    def wrap(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        def connect_watched(*args: Any) -> Any:
            client = connect(*args)
            client.meta.events.register("before-send.s3", self.note)
            return client

        return connect_watched
