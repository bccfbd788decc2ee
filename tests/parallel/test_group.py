"""What ranks do together, on three real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from parallel.worlds import start

from mxdist.runtime.parallel import AllReduce, Alone
from mxdist.runtime.parallel.base import plain

SIZE = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("group")
    world = start(folder, [sys.executable, str(Path(__file__).with_name("group_checks.py")), str(folder)], SIZE)
    assert world.wait() == [0] * SIZE, world.logs()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_all_ranks_find_the_same(found: list[dict[str, Any]]) -> None:
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("large", 16777217.0),  # float32 would say 16777216
        ("third", 1 / 3),
        ("gathered", [[0, 0], [1, -1], [2, -2]]),
        ("means", 1 / 199),  # a mean of means would say 1/3
        ("nobody", True),
        ("any", [False, True]),
        ("bytes", [70_000, 0]),
        ("shared", {"from": 0, "none": None}),
        ("share_fails", "CheckpointError: torn"),
        ("summed", [[6.0], [[30.0, 3.0]]]),
        ("named", [3.0, 3.0]),
        ("reordered", [2.0]),
        ("convolved", [3 * 36.0]),  # 6 x 6 outputs of inputs that are 1
        ("broadcast", 0.0),
        ("equal", 64),
        ("differ", "TrainingFailed: the parameters of rank 2 differ from those of rank 0 here."),
    ],
)
def test_what_ranks_do_together(found: list[dict[str, Any]], what: str, expected: object) -> None:
    assert found[1][what] == expected


def test_what_is_broadcast_travels_through_host_memory() -> None:
    """A stage's weights are on its own rank's GPU, in host memory elsewhere; here, another CPU context stands in."""
    travelled = []

    def broadcast_(array: mx.nd.NDArray, root_rank: int, name: str) -> None:
        travelled.append((name, array.context, root_rank))
        array[:] = 7.0

    group = AllReduce.__new__(AllReduce)
    group._hvd = SimpleNamespace(broadcast_=broadcast_)
    arrays = {"there": mx.nd.zeros((2,), ctx=mx.cpu(1)), "here": mx.nd.zeros((2,))}
    group.broadcast_(arrays)
    assert travelled == [("mxdist.broadcast.here", mx.cpu(), 0), ("mxdist.broadcast.there", mx.cpu(), 0)]
    assert arrays["there"].context == mx.cpu(1)
    assert [array.asnumpy().tolist() for array in arrays.values()] == [[7.0, 7.0], [7.0, 7.0]]


def test_each_world_keeps_what_was_made_for_it() -> None:
    one, other = Alone(), Alone()
    assert [one.once("key", lambda: "first"), one.once("key", lambda: "second")] == ["first", "first"]
    assert other.once("key", lambda: "other") == "other"
    assert [one.forget("key"), one.forget("key")] == ["first", None]
    assert one.once("key", lambda: "third") == "third"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int32", "int64"])
def test_a_plain_copy_is_a_copy(dtype: str) -> None:
    array = mx.nd.array(np.array([0, 1, 100]), dtype=dtype)
    copy = plain(array, mx.cpu())
    array[:] = 5
    assert copy.dtype == array.dtype
    assert copy.asnumpy().tolist() == [0, 1, 100]
