"""The network devices of this host, their addresses, and which of them other hosts can really reach.

Addresses come from the kernel itself (rtnetlink), in the kernel's order: of several at one device the first is the one
that Gloo takes. Whether an address can be reached is tried, not guessed: two hosts may both have a ``docker0`` at
172.17.0.1, and whoever connects there meets himself; so who listens says a word that only he knows.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_RTM_NEWADDR, _RTM_GETADDR, _NLMSG_DONE, _NLMSG_ERROR = 20, 22, 3, 2
_KERNEL_S = 5.0
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_REACH_S = 3.0
_AT_ONCE = 32


@dataclass(frozen=True)
class Address:
    """One address of this host.

    :param prefix: length of its network's prefix.
    """

    device: str
    address: str
    prefix: int

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """The network that it is in."""
        return ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)

    @property
    def loopback(self) -> bool:
        """Whether it never leaves the host."""
        return ipaddress.ip_address(self.address).is_loopback


def addresses() -> list[Address]:
    """Return the addresses of this host's devices, in the kernel's order, without those that mean nothing elsewhere."""
    found = [one for family in (socket.AF_INET, socket.AF_INET6) for one in _dump(family)]
    return [one for one in found if not ipaddress.ip_address(one.address).is_link_local]


def candidates(found: Iterable[Address], wanted: str | None, name: str = "") -> list[Address]:
    """Return the addresses that ranks may use, the most likely first.

    Of several addresses of a device, the first is the one that Gloo takes; another one must be asked for.

    :param wanted: a device, an address or a network; None: whatever leaves the host.
    :param name: what the host is called: if that is an address in a network of its own, it is the one.
    """
    fitting = [_named(one, name) for one in found if _fits(one, wanted)]
    first: dict[tuple[str, bool], Address] = {}
    for one in fitting:
        first.setdefault((one.device, ":" in one.address), one)
    kept = [one for one in fitting if one in first.values() or name == one.address or _is_network(wanted)]
    return sorted(kept, key=lambda one: (one.address != name, ":" in one.address))


def _is_network(wanted: str | None) -> bool:
    try:
        return wanted is not None and bool(ipaddress.ip_network(wanted, strict=False))
    except ValueError:
        return False


def _fits(one: Address, wanted: str | None) -> bool:
    if wanted is None:
        return not one.loopback
    if wanted == one.device:
        return True
    try:
        return ipaddress.ip_address(one.address) in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def _named(one: Address, name: str) -> Address:
    """Every address of 127.0.0.0/8 is this host's, so hosts of a test can be told apart by them."""
    with contextlib.suppress(ValueError):
        if one.loopback and ipaddress.ip_address(name) in one.network:
            return Address(one.device, name, one.prefix)
    return one


class Listener:
    """Listens at some addresses, on ports that the kernel chooses, and tells everybody its word, until it is closed."""

    def __init__(self, at: Iterable[str]) -> None:
        self.word = secrets.token_hex(8)
        self.ports: dict[str, int] = {}
        self._open = True
        self._selector = selectors.DefaultSelector()
        for address in at:
            with contextlib.suppress(OSError):  # an address that has just gone
                server = socket.create_server((address, 0), family=_family(address))
                server.setblocking(False)
                self._selector.register(server, selectors.EVENT_READ)
                self.ports[address] = server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="nics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._open = False
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _serve(self) -> None:
        while self._open:
            for key, _ in self._selector.select(0.1):
                with contextlib.suppress(OSError):
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                    with connection:
                        connection.sendall(self.word.encode())


def reach(targets: Sequence[tuple[str, int, str]], *, timeout_s: float = _REACH_S) -> list[bool]:
    """Return which of ``(address, port, word)`` can be reached from here; all are tried at once."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(targets))) as pool:
        return list(pool.map(lambda target: _meets(target, timeout_s), targets))


def _meets(target: tuple[str, int, str], timeout_s: float) -> bool:
    address, port, word = target
    give_up = time.monotonic() + timeout_s
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout_s) as connection:
        said = b""
        while len(said) < len(word) and time.monotonic() < give_up:
            more = connection.recv(64)
            if not more:
                break
            said += more
        return said.decode(errors="replace") == word
    return False


def choose(
    hosts: Sequence[Sequence[Address]], reached: Mapping[tuple[int, str], set[int]], needed: Sequence[set[int]]
) -> list[Address | None]:
    """Return for each host the address at which the others meet it; None where there is none. Pure.

    Of several, IPv4 first, and then the one whose network most hosts are in: that is the cluster's own.

    :param hosts: the candidates of each.
    :param reached: which hosts could reach an address of a host.
    :param needed: which hosts must.
    """
    shared: dict[str, int] = {}
    for own in hosts:
        for network in {str(one.network) for one in own}:
            shared[network] = shared.get(network, 0) + 1
    chosen: list[Address | None] = []
    for index, own in enumerate(hosts):
        good = [one for one in own if needed[index] <= reached.get((index, one.address), set())]
        chosen.append(min(good, key=lambda one: (":" in one.address, -shared[str(one.network)]), default=None))
    return chosen


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _dump(family: socket.AddressFamily) -> Iterator[Address]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:  # type: ignore[attr-defined,unused-ignore]
        body = struct.pack("=BBBBi", family, 0, 0, 0, 0)
        kernel.settimeout(_KERNEL_S)
        kernel.sendall(struct.pack("=IHHII", 16 + len(body), _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(1 << 17)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    return
                if kind == _RTM_NEWADDR:
                    yield from _address(family, data[16:length])
                data = data[(length + 3) & ~3 :]


def _address(family: socket.AddressFamily, message: bytes) -> Iterator[Address]:
    prefix, index = message[1], struct.unpack_from("=i", message, 4)[0]
    attributes: dict[int, bytes] = {}
    rest = message[8:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            break
        attributes[kind] = rest[4:length]
        rest = rest[(length + 3) & ~3 :]
    raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    with contextlib.suppress(OSError):  # a device that has just gone
        if raw:
            yield Address(socket.if_indextoname(index), socket.inet_ntop(family, raw), prefix)
