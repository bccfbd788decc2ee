"""Which of a host's cores each of its ranks gets. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def share_cores(cores: Iterable[int], size: int, *, pin: bool = True) -> list[tuple[int, ...]]:
    """Give each of ``size`` ranks cores of its own, neighbours together; none if there are too few, or one rank."""
    ordered = sorted(cores)
    each = len(ordered) // size
    if not pin or each == 0 or size == 1:
        return [()] * size
    return [tuple(ordered[rank * each : (rank + 1) * each]) for rank in range(size)]
