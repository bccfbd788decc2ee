"""Our seats are Horovod's: its own assignment is asked."""

from __future__ import annotations

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from hypothesis import given
from hypothesis import strategies as st

from mxdist.launch.hosts import HostPlan, seats


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_seats_are_those_of_horovod(slots: list[int]) -> None:
    expected = get_host_assignments([HostInfo(f"h{n}", count) for n, count in enumerate(slots)], sum(slots))

    found = seats([HostPlan(f"h{n}", count) for n, count in enumerate(slots)])

    assert [
        (f"h{one.host}", one.rank, one.local_rank, one.local_size, one.cross_rank, one.cross_size) for one in found
    ] == [(one.hostname, one.rank, one.local_rank, one.local_size, one.cross_rank, one.cross_size) for one in expected]
