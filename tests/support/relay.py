"""A relay in front of a real HTTP server, byte for byte, that can fail as networks and servers do."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from enum import StrEnum
from typing import Any, Self

from stack.ports import free_ports

_CHUNK = 1 << 16
_SLOW_S = 0.3
_LOOK_S = 0.05
_ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"


class Mood(StrEnum):
    """What happens to who talks through the relay."""

    PASS = "passes"
    REFUSED = "refused"
    BLACK_HOLE = "black hole"
    ERRORS = "500s"
    SLOW = "slow"


class Relay:
    """Listens on a loopback port of its own, which stays its own while it refuses connections.

    A change of mood also cuts or stops the connections that exist; in a black hole they stay open without a word.

    :param port: of the server behind it.
    """

    def __init__(self, port: int) -> None:
        self.upstream = port
        self._mood = Mood.PASS
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # By its number: a port that the system has chosen is given back when nobody listens any more.
        self.port = free_ports(1)[0]
        self._socket.bind(("127.0.0.1", self.port))

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def feel(self, mood: Mood) -> None:
        """Behave so from now on."""
        self._do(self._feel(mood))

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._feel(Mood.REFUSED))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._socket.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        if self._server is None:
            self._socket.listen()
            self._server = await asyncio.start_server(self._serve, sock=self._socket.dup())

    async def _feel(self, mood: Mood) -> None:
        self._mood = mood
        if mood is Mood.REFUSED and self._server is not None:
            self._server.close()
            self._server = None
            self._socket.shutdown(socket.SHUT_RDWR)  # listens no more, and stays bound
        if mood in {Mood.REFUSED, Mood.ERRORS}:
            for writer in list(self._open):
                writer.transport.abort()
            await asyncio.sleep(_LOOK_S)  # until who served them has noticed
        if mood is not Mood.REFUSED:
            await self._listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                if self._mood is Mood.ERRORS:
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(_ERROR)
                    await writer.drain()
                    return
                answers, upstream = await asyncio.open_connection("127.0.0.1", self.upstream)
                await asyncio.gather(self._pump(reader, upstream), self._pump(answers, writer))
        finally:
            self._open.discard(writer)
            for end in (writer, upstream):
                if end is not None:
                    end.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            while self._mood is Mood.BLACK_HOLE:
                await asyncio.sleep(_LOOK_S)
            if self._mood is Mood.SLOW:
                await asyncio.sleep(_SLOW_S)
            sink.write(data)
            await sink.drain()
        with suppress(OSError):
            sink.write_eof()
