"""What Horovod over MPI needs: other variables, and ``mpirun`` to start the ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_ONLY_GLOO = ("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_TIMEOUT_SECONDS")
_PLACES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
_GIVEN_BY_MPI = tuple(f"HOROVOD_{place}" for place in _PLACES)


def environment(gloo: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that meets the others by MPI, from those for Gloo."""
    kept = {name: value for name, value in gloo.items() if name not in _ONLY_GLOO}
    return {**kept, "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


def command(host: str, size: int, names: Iterable[str], command: Iterable[str]) -> tuple[str, ...]:
    """Return the command that starts all ranks.

    Variables travel by name: their values, secrets among them, are in mpirun's own environment. Where a rank stands in
    the world it learns from MPI. On one host all goes over shared memory and the loopback interface.

    :param names: variables of every rank.
    :param command: of one rank.
    """
    passed = [word for name in sorted(set(names) - set(_GIVEN_BY_MPI)) for word in ("-x", name)]
    return (
        "mpirun", "--host", f"{host}:{size}", "-np", str(size), "--bind-to", "none", "--mca", "plm", "isolated",
        "--mca", "oob_tcp_if_include", "lo", "--mca", "btl", "self,vader", *passed, *command,
    )  # fmt: skip
