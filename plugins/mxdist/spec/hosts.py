"""Hosts with slots, as people write them down: Horovod's ``node1:2``, mpirun's ``node1 slots=2``, ranges, comments."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MOST_HOSTS = 4096
MOST_SLOTS = 65_536
_MOST_RANGES = 4  # of one name
_MOST_TOLD = 10
_LABEL = re.compile(r"^[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?$")
_USER = re.compile(r"^[A-Za-z_][A-Za-z0-9_.-]{0,31}$")
_RANGE = re.compile(r"\[([0-9,-]+)\]")
_SETTING = re.compile(r"^(slots|max_slots|max-slots|port)=([0-9]{1,9})$")
_BRACKETED = re.compile(r"^\[([0-9A-Za-z:.%_-]+)\](?::([0-9]{1,9}))?$")


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
        words = line.lstrip("\ufeff").partition("#")[0].split()
        if not words:
            continue
        try:
            hosts += itertools.islice(_line(words), MOST_HOSTS + 1 - len(hosts))
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
        if len(hosts) > MOST_HOSTS:
            wrong.append(f"there are more than {MOST_HOSTS} hosts")
            break
    wrong += _twice(hosts)
    if len(wrong) > _MOST_TOLD:
        wrong[_MOST_TOLD:] = [f"and {len(wrong) - _MOST_TOLD} more"]
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(hosts)


def _twice(hosts: Iterable[Host]) -> list[str]:
    """Return who stands there more than once; letters of either case are the same to a resolver."""
    counts = Counter(host.name.lower() for host in hosts)
    return [f"{name} stands there {count} times" for name, count in counts.items() if count > 1]


def _line(words: list[str]) -> Iterator[Host]:
    settings: dict[str, int] = {}
    places: list[str] = []
    for word in words:
        found = _SETTING.match(word)
        if found is None:
            places += [place for place in _divide(word) if place]
            continue
        name, value = found[1].replace("-", "_"), int(found[2])
        if settings.setdefault(name, value) != value:
            raise ValueError(f"{name} is given as {settings[name]} and as {value}")
    if not places:
        raise ValueError(f"{_shown(' '.join(words))} names no host")
    odd = [place for place in places if "=" in place]
    if odd:
        raise ValueError(f"{_shown(odd[0])} is no setting; known are slots=, port=")
    return (_host(place, settings) for written in places for place in _spread(written))


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
    user, at, rest = place.rpartition("@")
    name, slots = _name_and_slots(rest)
    if at and not _USER.match(user):
        raise ValueError(f"{_shown(user)} is no user name")
    if slots is not None and settings.get("slots", slots) != slots:
        raise ValueError(f"{name} is given {slots} and {settings['slots']} slots")
    slots, port = settings.get("slots", slots), settings.get("port")
    if slots == 0:
        raise ValueError(f"{name} has no slots")
    if slots is not None and slots > MOST_SLOTS:
        raise ValueError(f"{name} has more than {MOST_SLOTS} slots")
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"{port} is no port")
    return Host(name, slots, user or None, port)


def _name_and_slots(text: str) -> tuple[str, int | None]:
    bracketed = _BRACKETED.match(text)
    if bracketed:
        return _address(bracketed[1]), int(bracketed[2]) if bracketed[2] else None
    if text.count(":") > 1:
        return _address(text), None
    name, colon, slots = text.partition(":")
    if colon and not re.fullmatch("[0-9]{1,9}", slots):
        raise ValueError(f"{_shown(text)}: slots must be a whole number")
    return _name(name), int(slots) if colon else None


def _name(name: str) -> str:
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.match(label) for label in labels):
        raise ValueError(f"{_shown(name)} is no host name")
    if labels[-1].isdigit():  # resolvers take 7 and 10.1 for addresses: 0.0.0.7 and 10.0.0.1
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            hint = "; slots are written node:2 or slots=2" if name.isdigit() else ""
            raise ValueError(f"{_shown(name)} is no host name and no address{hint}") from None
    return name


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(f"{_shown(text)} is no IPv6 address") from None


def _spread(place: str, ranges: int = 0) -> Iterator[str]:
    """Yield the names that the ranges of a place stand for: digits keep their width."""
    found = _RANGE.search(place)
    if found is None:
        yield place
        return
    if ranges == _MOST_RANGES:
        raise ValueError(f"{_shown(place)} has more than {_MOST_RANGES} ranges")
    for number in _numbers(found[1]):
        yield from _spread(place[: found.start()] + number + place[found.end() :], ranges + 1)


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not re.fullmatch("[0-9]{1,9}", first) or (dash and not re.fullmatch("[0-9]{1,9}", last)):
            raise ValueError(f"{_shown(f'[{text}]')} is no range of numbers")
        if dash and int(last) < int(first):
            raise ValueError(f"{_shown(f'[{text}]')} is no range of numbers")
        if int(last or first) - int(first) >= MOST_HOSTS:
            raise ValueError(f"[{text}] is more than {MOST_HOSTS} hosts")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
