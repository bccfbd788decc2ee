"""Horovod over MPI: what the plan lays out."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from mxdist.launch import mpi
from mxdist.launch.plan import SECRET_NAMES, Plan, build_plan
from mxdist.runtime.hosts import HostLink
from mxdist.runtime.meeting import Spot
from mxdist.runtime.mpi_world import networks
from mxdist.runtime.nics import Address
from mxdist.runtime.orders import Meeting, orders
from mxdist.spec import parse_job

PYTHON = "/node/bin/python"


def plan(**parallelism: Any) -> Plan:
    job = parse_job({"name": "a", "script": {"path": "train.py"}, "parallelism": parallelism})
    return build_plan(job, "key", runs_uri="s3://runs", python=PYTHON, workdir="/scratch", cores=(0, 1))


def words_after(command: tuple[str, ...], option: str) -> set[str]:
    return {command[at + 1] for at, word in enumerate(command) if word == option}


def test_mpirun_gives_each_rank_a_place() -> None:
    command = plan(world_size=2, controller="mpi").starter
    assert command[:4] == (PYTHON, "-m", "mxdist.runtime.mpi_start", "mpirun")
    assert words_after(command, "--host") == {"127.0.0.1:2"}
    assert words_after(command, "-np") == {"2"}
    assert command[-3:] == (PYTHON, "-m", "mxdist.runtime.mpi_place")


def test_nothing_of_a_rank_passes_through_mpirun() -> None:
    command = plan(world_size=2, controller="mpi").starter
    assert not words_after(command, "-x")
    assert not set(SECRET_NAMES) & set(command)
    assert not [word for word in command if "=" in word]


def test_several_hosts_are_reached_through_the_supervisor() -> None:
    command = mpi.command([("10.1.0.2", 2), ("10.1.0.3", 1)], PYTHON, ["10.1.0.0/24"])
    golden = """
        /node/bin/python -m mxdist.runtime.mpi_start mpirun -quiet --host 10.1.0.2:2,10.1.0.3:1 -np 3 --bind-to none
        --wdir / --leave-session-attached --mca plm rsh --mca plm_rsh_no_tree_spawn 1
        --mca oob_tcp_if_include 10.1.0.0/24
        /node/bin/python -m mxdist.runtime.mpi_place
    """
    assert list(command) == golden.split()


def test_daemons_come_over_any_network_when_none_is_known() -> None:
    command = mpi.command([("10.1.0.2", 1), ("10.1.0.3", 1)], PYTHON, [])
    assert words_after(command, "plm") == {"rsh"}
    assert "oob_tcp_if_include" not in command


def test_a_rank_talks_over_the_device_of_its_own_host() -> None:
    job = parse_job({
        "name": "a", "script": {"path": "train.py"}, "parallelism": {"world_size": 2, "controller": "mpi"},
        "cluster": {"kind": "ssh", "hosts": ["a:1", "b:1"]},
    })  # fmt: skip
    laid_out = build_plan(job, "key", runs_uri="s3://runs", python=PYTHON, workdir="/scratch", cores=(0, 1))
    meeting = Meeting([Spot("10.1.0.2", "eth0"), Spot("10.1.0.3", "ens5")], "10.1.0.2", 1234)
    devices = [
        order.environment["OMPI_MCA_btl_tcp_if_include"]
        for host in (0, 1)
        for order in orders(laid_out, job, host, meeting)
        if order.name.startswith("rank")
    ]
    assert devices == ["eth0", "ens5"]


def test_networks_of_one_address_are_not_named_to_mpirun() -> None:
    link = Mock(spec=HostLink)
    link.addresses.return_value = [Address("eth0", "10.1.0.2", 24), Address("ens5", "10.2.0.2", 32)]
    assert networks([link], ["10.1.0.2", "10.2.0.2", "127.0.0.7"]) == ["10.1.0.0/24"]


def test_plan_of_several_hosts_names_them() -> None:
    job = parse_job({
        "name": "a", "script": {"path": "train.py"}, "parallelism": {"world_size": 3, "controller": "mpi"},
        "cluster": {"kind": "ssh", "hosts": ["a:2", "b:1"]},
    })  # fmt: skip
    laid_out = build_plan(job, "key", runs_uri="s3://runs", python=PYTHON, workdir="/scratch", cores=(0, 1))
    assert words_after(laid_out.starter, "--host") == {"a:2,b:1"}
    assert "<network>" in laid_out.starter  # known once the hosts have met
    assert not {"HOROVOD_GLOO_IFACE", "HOROVOD_HOSTNAME"} & set(laid_out.runtime_names)


def test_the_supervisor_starts_the_same_ranks_as_over_gloo() -> None:
    over_mpi, over_gloo = plan(world_size=2, controller="mpi"), plan(world_size=2)
    assert [rank.command for rank in over_mpi.ranks] == [rank.command for rank in over_gloo.ranks]
    assert [rank.cores for rank in over_mpi.ranks] == [(0,), (1,)]


def test_variables_are_those_of_mpi() -> None:
    environment = plan(world_size=2, controller="mpi").ranks[0].environment
    assert environment["HOROVOD_CONTROLLER"] == environment["HOROVOD_CPU_OPERATIONS"] == "mpi"
    assert not [name for name in environment if "GLOO" in name]
    assert {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_RANK"} <= environment.keys()


def test_plan_shows_the_starter_only_over_mpi() -> None:
    shown = plan(world_size=2, controller="mpi").describe()
    assert f"\nstarter     {PYTHON} -m mxdist.runtime.mpi_start mpirun -quiet --host 127.0.0.1:2 -np 2 " in shown
    for other in (plan(world_size=2), plan(world_size=1, controller="mpi")):
        assert other.starter == ()
        assert "starter" not in other.describe()
