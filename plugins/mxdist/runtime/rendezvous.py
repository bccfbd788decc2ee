"""Horovod's own rendezvous, bound to one address. Horovod's ``RendezvousServer.start`` would listen on every one."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Sequence
from typing import Any

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from mxdist.launch.hosts import LOOPBACK

_POLL_S = 0.5  # how often the serving thread looks whether it should end; requests do not wait for it


class _Handler(RendezvousHandler):  # type: ignore[misc]  # horovod is untyped
    """Keeps, beside the addresses, which ranks have come: the addresses are removed once the world stands."""

    server: _Server

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        super()._put_value(scope, key, value)
        rank = key.removeprefix("rank_")
        if scope.startswith("global") and rank.isdigit():
            self.server.come.add(int(rank))


class _Server(RendezvousHTTPServer):  # type: ignore[misc]  # horovod is untyped
    daemon_threads = True

    def __init__(self, address: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Handler, 0)
        self.come: set[int] = set()

    def server_bind(self) -> None:
        """Bind without asking a name server for our own name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]


class Rendezvous:
    """The meeting point of one world.

    :param hosts: the address of each host as its ranks have it in ``HOROVOD_HOSTNAME``, with its number of ranks; a
        number alone: ranks of this host.
    :param address: where it listens.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]] | int, address: str = LOOPBACK) -> None:
        places = [(LOOPBACK, hosts)] if isinstance(hosts, int) else hosts
        size = sum(slots for _, slots in places)
        self.slots: list[Any] = get_host_assignments([HostInfo(name, slots) for name, slots in places], size)
        self._server = _Server(address)
        self._server.init(self.slots)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)
        self._thread.start()

    def joined(self) -> set[int]:
        """Return the ranks that have told their address."""
        return set(self._server.come)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
