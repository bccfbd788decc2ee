"""What Horovod over MPI needs: other variables, and ``mpirun``, which gives each rank its place. Pure.

mpirun does not start the ranks: it starts a holder for each, which tells the supervisor what the rank must know to be
part of the MPI world (``mxdist.runtime.mpi_place``). The supervisor starts the ranks as it does over Gloo. So no
variable of a rank, and no secret, passes through mpirun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mxdist.launch.hosts import HostPlan

NAME = "mpirun"
"""What people call the process that holds an MPI world together."""

_ONLY_GLOO = ("HOROVOD_GLOO_IFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_TIMEOUT_SECONDS")
_PASSED = ("MXDIST_TOKEN", "MXDIST_WORLD_DIR", "PYTHONPATH")


def environment(gloo: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that meets the others by MPI, from those for Gloo.

    A rank that waits for others lets its own threads have the core: they share the one that it is bound to.
    """
    kept = {name: value for name, value in gloo.items() if name not in _ONLY_GLOO}
    return {**kept, "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", "OMPI_MCA_mpi_yield_when_idle": "1"}


def command(hosts: Sequence[HostPlan], python: str) -> tuple[str, ...]:
    """Return the command that gives all ranks their places.

    On one host all goes over shared memory and the loopback interface.
    """
    size = sum(host.slots for host in hosts)
    offered = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    passed = [word for name in _PASSED for word in ("-x", name)]
    return (
        python, "-m", "mxdist.runtime.mpi_start", NAME, "-quiet", "--host", offered, "-np", str(size),
        "--bind-to", "none", "--mca", "plm", "isolated", "--mca", "oob_tcp_if_include", "lo", "--mca", "pml", "ob1",
        "--mca", "btl", "self,vader", *passed, python, "-m", "mxdist.runtime.mpi_place",
    )  # fmt: skip
