"""Hosts with slots, as people write them down: Horovod's ``node1:2``, mpirun's ``node1 slots=2``, ranges, comments."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MOST_HOSTS = 4096
_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$")
_USER = re.compile(r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}$")
_RANGE = re.compile(r"\[([0-9,-]+)\]")
_SETTING = re.compile(r"^(slots|max_slots|max-slots|port)=(\d+)$")


@dataclass(frozen=True)
class Host:
    """One host of an inventory.

    :param name: a name or an address (IPv6 without brackets).
    :param slots: ranks it takes; None: as the job says for all hosts.
    :param user: who to log in as; None: as the job or the connection says.
    :param port: of sshd; None: as the job or the connection says.
    """

    name: str
    slots: int | None = None
    user: str | None = None
    port: int | None = None


def parse_inventory(lines: Iterable[str]) -> tuple[Host, ...]:
    """Return the hosts of an inventory, in its order.

    A line is ``[user@]host[:slots]``, with ``slots=N`` and ``port=N`` after it if wanted; several hosts may share a
    line, divided by commas. ``node[01-03,7]`` is a range; an IPv6 address with slots stands in brackets. ``#`` begins a
    comment; blank lines are none.

    :raises ValueError: with every line that says nothing sensible.
    """
    hosts: list[Host] = []
    wrong: list[str] = []
    for number, line in enumerate(itertools.chain.from_iterable(text.splitlines() or [""] for text in lines), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts += _line(words)
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
    if not wrong and len(hosts) > MOST_HOSTS:
        wrong.append(f"{len(hosts)} hosts are more than {MOST_HOSTS}")
    names = [host.name for host in hosts]
    wrong += [
        f"{name} stands there {names.count(name)} times" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(hosts)


def _line(words: list[str]) -> list[Host]:
    settings: dict[str, int] = {}
    places: list[str] = []
    for word in words:
        found = _SETTING.match(word)
        if found:
            settings[found[1].replace("-", "_")] = int(found[2])
        else:
            places += [place for place in _divide(word) if place]
    if not places:
        raise ValueError(f"{' '.join(words)!r} names no host")
    if len(places) > 1 and any("=" in place for place in places):
        raise ValueError(f"{next(place for place in places if '=' in place)!r} is no setting; known are slots=, port=")
    return [_host(name, settings) for place in places for name in _spread(place)]


def _divide(word: str) -> Iterator[str]:
    """Divide at commas outside of brackets."""
    depth, begin = 0, 0
    for position, letter in enumerate(word):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield word[begin:position]
            begin = position + 1
    yield word[begin:]


def _host(place: str, settings: dict[str, int]) -> Host:
    user, _, rest = place.rpartition("@")
    name, slots = _name_and_slots(rest)
    if user and not _USER.match(user):
        raise ValueError(f"{user!r} is no user name")
    if slots is not None and "slots" in settings and slots != settings["slots"]:
        raise ValueError(f"{name} is given {slots} and {settings['slots']} slots")
    slots, port = slots if slots is not None else settings.get("slots"), settings.get("port")
    if slots == 0:
        raise ValueError(f"{name} has no slots")
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{port} is no port")
    return Host(name, slots, user or None, port)


def _name_and_slots(text: str) -> tuple[str, int | None]:
    bracketed = re.match(r"^\[([0-9A-Fa-f:.%A-Za-z0-9]+)\](?::(\d+))?$", text)
    if bracketed:
        return _address(bracketed[1]), int(bracketed[2]) if bracketed[2] else None
    if text.count(":") > 1:
        return _address(text), None
    name, colon, slots = text.partition(":")
    if colon and not slots.isdigit():
        raise ValueError(f"{text!r}: slots must be a whole number")
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is no host name")
    return name, int(slots) if colon else None


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(f"{text!r} is no IPv6 address") from None


def _spread(place: str) -> Iterator[str]:
    """Yield the names that the ranges of a place stand for: digits keep their width."""
    found = _RANGE.search(place)
    if found is None or ":" in found[1]:
        yield place
        return
    for number in _numbers(found[1]):
        yield from _spread(place[: found.start()] + number + place[found.end() :])


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"[{text}] is no range of numbers")
        if int(last or first) - int(first) >= MOST_HOSTS:
            raise ValueError(f"[{text}] is more than {MOST_HOSTS} hosts")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
