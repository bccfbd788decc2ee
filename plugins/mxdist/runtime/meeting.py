"""Where the ranks of a world meet: one address for every host, at which all other hosts really reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxdist.errors import LaunchError
from mxdist.runtime import nics

if TYPE_CHECKING:
    from mxdist.runtime.hosts import HostLink

_NEIGHBOURS = 8
"""Above so many hosts, each tries these, beside the first, and not all."""


@dataclass(frozen=True)
class Spot:
    """Where a host is in the network.

    :param device: that has the address.
    """

    address: str
    device: str


def find_network(
    links: Sequence[HostLink], each: Callable[[Callable[[HostLink], Any]], list[Any]], wanted: str | None
) -> list[Spot]:
    """Return the spot of every host.

    :param each: does something with all hosts at once.
    :param wanted: the network that the job asks for: a device, an address or a subnet.
    :raises LaunchError: a host has no address that all others reach; with who reaches what.
    """
    found = [nics.candidates(link.addresses(), wanted, link.name) for link in links]
    for link, own in zip(links, found, strict=True):
        if not own:
            raise LaunchError(
                f"{link.name} has no address{f' at {wanted}' if wanted else ' but loopback'}: {_all(link)}.",
                hint="Set cluster.interface to a device or a subnet that every host has.",
                retryable=False,
            )
    place = {id(link): number for number, link in enumerate(links)}
    heard = each(lambda link: link.listen([one.address for one in found[place[id(link)]]]))
    try:
        needed = [_peers(number, len(links)) for number in range(len(links))]
        askers = [[other for other in range(len(links)) if number in needed[other]] for number in range(len(links))]
        targets = [
            [(other, address, port, heard[other][1]) for other in asked for address, port in heard[other][0].items()]
            for asked in askers
        ]
        met = each(lambda link: link.reach([target[1:] for target in targets[place[id(link)]]]))
    finally:
        each(lambda link: link.deaf())
    reached: dict[tuple[int, str], set[int]] = {}
    for asker, (asked, answers) in enumerate(zip(targets, met, strict=True)):
        for (other, address, _, _), good in zip(asked, answers, strict=True):
            if good:
                reached.setdefault((other, address), set()).add(asker)
    chosen = nics.choose(found, reached, needed)
    if None in chosen:
        raise LaunchError(
            f"the hosts do not all reach each other:\n{matrix([link.name for link in links], found, reached, needed)}",
            hint="Name the network that they share as cluster.interface, or open it between them.",
        )
    return [Spot(one.address, one.device) for one in chosen if one is not None]


def matrix(
    names: Sequence[str],
    found: Sequence[Sequence[nics.Address]],
    reached: dict[tuple[int, str], set[int]],
    needed: Sequence[set[int]],
) -> str:
    """Return who reaches whom, as text: one line an address."""
    lines = []
    for number, own in enumerate(found):
        for one in own:
            missing = sorted(needed[number] - reached.get((number, one.address), set()))
            told = f"not from {', '.join(names[other] for other in missing)}" if missing else "from all"
            lines.append(f"  {names[number]} at {one.address} ({one.device}): reached {told}")
    return "\n".join(lines)


def _peers(number: int, size: int) -> set[int]:
    """Return who must reach a host: all others, or in a large world the first, the last and its neighbours."""
    if size <= _NEIGHBOURS + 1:
        return set(range(size)) - {number}
    near = {(number + step) % size for step in range(1, _NEIGHBOURS)}
    return (near | {0, size - 1}) - {number}


def _all(link: HostLink) -> str:
    return ", ".join(f"{one.address} ({one.device})" for one in link.addresses()) or "none"
