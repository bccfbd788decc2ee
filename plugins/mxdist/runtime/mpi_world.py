"""The part of a world that MPI adds: mpirun beside the ranks, and a place for each of them.

What is known of places lies in the world's folder: see ``mpi_place``, which runs on the ranks' hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mxdist.errors import LaunchError
from mxdist.launch import mpi
from mxdist.launch.plan import Plan
from mxdist.launch.roles import RolePlan
from mxdist.runtime import exit_codes
from mxdist.runtime.crew import Order
from mxdist.runtime.hosts import HostLink
from mxdist.runtime.mpi_place import place_file
from mxdist.runtime.place import read_json, tail

Places = Mapping[int, Mapping[str, str]]
"""The variables that each rank gets from MPI."""

_LOOK_S = 0.02
_LEAVE_S = 2.0


def daemons(plan: Plan, away: Sequence[int]) -> list[RolePlan]:
    """Return mpirun's daemons as processes beside the ranks; which command they run, mpirun tells.

    :param away: the numbers of the hosts that are not the supervisor's own.
    """
    return [RolePlan("orted", number, plan.hosts[number].name, (), (), {}) for number in away if plan.starter]


def networks(links: Sequence[HostLink], addresses: Collection[str]) -> list[str]:
    """Return the networks in which hosts meet at these addresses. Devices may have other names on other hosts."""
    found = {one.network for link in links for one in link.addresses() if one.address in addresses}
    return sorted(str(one) for one in found if one.num_addresses > 1)


def in_place(orders: Sequence[Order], places: Places) -> list[Order]:
    """Return the orders with what each rank gets from MPI."""
    given = {f"rank {rank}": variables for rank, variables in places.items()}
    return [replace(one, environment={**one.environment, **given.get(one.name, {})}) for one in orders]


def wait_for_places(
    world: Path,
    size: int,
    *,
    timeout_s: float,
    ended: Callable[[], int | None],
    meanwhile: Callable[[], None] = lambda: None,
) -> Places:
    """Return what each rank gets from MPI, once all of them have a place.

    :param world: the world's folder.
    :param ended: returns mpirun's exit code, or None.
    :param meanwhile: called now and then.
    :raises LaunchError: mpirun has ended, or that took too long.
    """
    give_up = time.monotonic() + timeout_s
    while True:
        meanwhile()
        found = {rank: read_json(place_file(world, rank)) for rank in range(size)}
        missing = [rank for rank, place in found.items() if not place]
        if not missing:
            return {rank: dict(place["environment"]) for rank, place in found.items()}
        code = ended()
        if code is not None:
            said = tail(world / f"{mpi.NAME}.log").decode(errors="replace").strip()
            message = f"mpirun ended with code {code} before all ranks had a place: {said[-2000:] or 'it said nothing'}"
            raise LaunchError(message, retryable=code != exit_codes.USER_ERROR)
        if time.monotonic() > give_up:
            named = ", ".join(map(str, missing))
            raise LaunchError(f"mpirun gave no place to rank {named} within {timeout_s:g} s; its log may say why.")
        time.sleep(_LOOK_S)


def joined(world: Path, size: int) -> set[int]:
    """Return the ranks that have called ``MPI_Init``."""
    return {rank for rank in range(size) if read_json(place_file(world, rank)).get("joined")}


def wait_for_end(ended: Callable[[], int | None]) -> None:
    """Let mpirun end by itself, once the holders go; one that does not is left to who ends the job's processes."""
    give_up = time.monotonic() + _LEAVE_S
    while ended() is None and time.monotonic() < give_up:
        time.sleep(_LOOK_S)
