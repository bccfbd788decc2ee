"""Free ports on loopback."""

from __future__ import annotations

import random
import socket

from stack.processes import ServiceError

# Below the range from which Linux gives ports to outgoing connections (32768), so that none of those takes one
# of ours between the choice and the start.
_FIRST, _LAST = 18000, 32000


def is_free(port: int) -> bool:
    """Return whether a server could listen on this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def port_of(name: str, text: str) -> int:
    """Return the port that a setting holds.

    :raises ServiceError: it is no port.
    """
    port = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= port <= 65535:
        raise ServiceError(f"{name}={text} is no port: it must be a whole number from 1 to 65535.")
    return port


def free_ports(count: int) -> list[int]:
    """Return different ports that are free now."""
    found: list[int] = []
    candidates = random.SystemRandom()  # tests seed the global generator, so all would choose the same
    while len(found) < count:
        port = candidates.randint(_FIRST, _LAST)
        if port not in found and is_free(port):
            found.append(port)
    return found
