"""What Horovod over MPI needs: other variables, and ``mpirun``, which gives each rank its place. Pure.

mpirun does not start the ranks: it starts a holder for each, which tells the supervisor what the rank must know to be
part of the MPI world (``mxdist.runtime.mpi_place``). The supervisor starts the ranks as it does over Gloo. So no
variable of a rank, and no secret, passes through mpirun. Nor does mpirun reach other hosts by itself: the supervisor
starts its daemons there, on whatever way it has to a host (``mxdist.runtime.mpi_reach``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NAME = "mpirun"
"""What people call the process that holds an MPI world together."""

_ONLY_GLOO = ("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_TIMEOUT_SECONDS")
_HERE = (
    "--mca", "plm", "isolated", "--mca", "oob_tcp_if_include", "lo",
    "--mca", "pml", "ob1", "--mca", "btl", "self,vader",
)  # fmt: skip


def environment(gloo: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that meets the others by MPI, from those for Gloo.

    A rank that waits for others lets its own threads have the core: they share the one that it is bound to.
    """
    kept = {name: value for name, value in gloo.items() if name not in _ONLY_GLOO}
    return {**kept, "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", "OMPI_MCA_mpi_yield_when_idle": "1"}


def location(device: str) -> dict[str, str]:
    """Return where a rank is in the network.

    A device's name means one thing on its host. Networks would not do for ranks: Open MPI 4.1 takes one of a single
    address (``10.1.0.2/32``) for all there are, a bridge of containers too, and then waits for ever.
    """
    return {"OMPI_MCA_btl_tcp_if_include": device}


def command(slots: Sequence[tuple[str, int]], python: str, networks: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the command that gives all ranks their places.

    :param slots: the address of each host, with its number of ranks.
    :param networks: over which mpirun talks with its daemons (``10.1.0.0/24``); empty: any; None: there is one host,
        the one that mpirun runs on, and all goes over shared memory and the loopback interface.
    """
    offered, size = ",".join(f"{address}:{count}" for address, count in slots), sum(count for _, count in slots)
    return (
        python, "-m", "mxdist.runtime.mpi_start", NAME, "-quiet", "--host", offered, "-np", str(size),
        "--bind-to", "none", "--wdir", "/", *(_HERE if networks is None else _between(",".join(networks))),
        python, "-m", "mxdist.runtime.mpi_place",
    )  # fmt: skip


def _between(networks: str) -> tuple[str, ...]:
    """Return what Open MPI must know of hosts: how its daemons come there (see ``mpi_reach``), and where to talk."""
    return (
        "--leave-session-attached", "--mca", "plm", "rsh", "--mca", "plm_rsh_no_tree_spawn", "1",
        *(("--mca", "oob_tcp_if_include", networks) if networks else ()),
    )  # fmt: skip
