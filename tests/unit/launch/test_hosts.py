"""Who sits where: as Horovod's own assignment has it, for any slots."""

from __future__ import annotations

from typing import Any

import pytest

from mxdist.errors import SpecError
from mxdist.launch.hosts import HostPlan, Seat, place, seats
from mxdist.spec import TrainingJob


def job(ranks: int, **cluster: Any) -> TrainingJob:
    document = {"name": "test", "script": {"path": "/train.py"}, "cluster": cluster}
    found = TrainingJob.parse({**document, "parallelism": {"world_size": ranks}})
    assert isinstance(found, TrainingJob)
    return found


def ssh(ranks: int, *hosts: str, **more: Any) -> TrainingJob:
    return job(ranks, kind="ssh", hosts=list(hosts), **more)


def slots(found: tuple[HostPlan, ...]) -> dict[str, int]:
    return {host.name: host.slots for host in found}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (job(3), {"127.0.0.1": 3}),
        (ssh(3, "a:2", "b:2"), {"a": 2, "b": 1}),
        (ssh(2, "a:2", "b:2"), {"a": 2}),
        (ssh(5, "a:1", "b:3", "c:2"), {"a": 1, "b": 3, "c": 1}),
        (ssh(3, "a", "b"), {"a": 2, "b": 1}),
        (ssh(4, "a:2", "b"), {"a": 2, "b": 2}),
        (ssh(4, "a", "b", slots=3), {"a": 3, "b": 1}),
        (ssh(1, "node[1-3]"), {"node1": 1}),
        (job(5, kind="slurm", slots=2), {"<node 1>": 2, "<node 2>": 2, "<node 3>": 1}),
        (job(5, kind="slurm", nodes=2), {"<node 1>": 3, "<node 2>": 2}),
        (job(4, kind="slurm"), {"<node 1>": 4}),
    ],
)
def test_hosts_are_filled_in_their_order(asked: TrainingJob, expected: dict[str, int]) -> None:
    assert slots(place(asked)) == expected


def test_platform_names_the_hosts() -> None:
    assert slots(place(job(5, kind="slurm", slots=2), ["n7", "n8", "n9"])) == {"n7": 2, "n8": 2, "n9": 1}
    assert slots(place(ssh(2, "a:1", "b:1", "c:1"), ["a", "c"])) == {"a": 1, "c": 1}, "b is left out"


def test_user_and_port_go_along() -> None:
    assert place(ssh(1, "ada@a:1 port=2222")) == (HostPlan("a", 1, "ada", 2222),)


def test_too_few_hosts_are_refused() -> None:
    with pytest.raises(SpecError, match="3 ranks do not fit on 1 host with 2 slots"):
        place(ssh(3, "a:2", "b:2"), ["a"])


def test_seats_count_within_and_across_hosts() -> None:
    found = seats([HostPlan("a", 1), HostPlan("b", 3), HostPlan("c", 2)])

    assert found == (
        Seat(0, 0, 0, 1, 0, 3),
        Seat(1, 1, 0, 3, 1, 3),
        Seat(2, 1, 1, 3, 0, 2),
        Seat(3, 1, 2, 3, 0, 1),
        Seat(4, 2, 0, 2, 2, 3),
        Seat(5, 2, 1, 2, 1, 2),
    )
