"""Every row once an epoch, whatever the number of ranks."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxdist.errors import DataError
from mxdist.runtime.batches import Batch, Examples, Feed, order, share, steps_of


def feed(rows: int, batch: int, rank: int, size: int, *, width: int = 2) -> Feed:
    """Return the feed of one rank over rows that hold their own numbers."""
    x = np.repeat(np.arange(rows, dtype=np.float32)[:, None], width, axis=1)
    return Feed(Examples(x, np.arange(rows)), batch, rank=rank, size=size, device=mx.cpu(), dtype="float64")


def seen(batches: list[Batch]) -> list[list[int]]:
    """Return the rows of each batch."""
    return [[] if batch.x is None else batch.x.asnumpy()[:, 0].astype(int).tolist() for batch in batches]


@given(st.integers(0, 200), st.integers(1, 9))
def test_shares_are_a_partition_and_even(total: int, size: int) -> None:
    parts = [range(total)[share(total, rank, size)] for rank in range(size)]
    assert [row for part in parts for row in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("rows", "batch", "size"), [(10, 4, 2), (9, 8, 2), (1, 8, 4), (700, 6, 3), (64, 64, 1)])
def test_ranks_together_see_each_global_batch(rows: int, batch: int, size: int) -> None:
    epoch = order(rows, seed=1, epoch=2, shuffle=True)
    ranks = [seen(list(feed(rows, batch, rank, size).batches(epoch))) for rank in range(size)]
    expected = [epoch[start : start + batch].tolist() for start in range(0, rows, batch)]
    assert [sum((rank[step] for rank in ranks), []) for step in range(len(expected))] == expected
    assert {len(rank) for rank in ranks} == {steps_of(rows, batch)}


def test_batches_know_how_many_rows_there_are_in_all() -> None:
    batches = list(feed(9, 8, 0, 2).batches(np.arange(9)))
    assert [(batch.rows, batch.total) for batch in batches] == [(4, 8), (0, 1)]
    assert batches[1].x is None


def test_feed_goes_on_from_any_step() -> None:
    epoch = order(30, seed=0, epoch=0, shuffle=True)
    assert seen(list(feed(30, 4, 0, 1).batches(epoch, 5))) == seen(list(feed(30, 4, 0, 1).batches(epoch)))[5:]


def test_large_examples_come_in_small_pieces() -> None:
    assert len(list(feed(6, 2, 0, 1, width=3 << 20).batches(np.arange(6)))) == 3


def test_inputs_keep_their_type_and_targets_get_the_networks() -> None:
    examples = Examples(np.zeros((4, 3), dtype=np.uint8), np.arange(4))
    batch = next(iter(Feed(examples, 2, rank=0, size=1, device=mx.cpu(), dtype="float64").batches(np.arange(4))))
    assert batch.x is not None
    assert batch.y is not None
    assert (batch.x.dtype, batch.y.dtype) == (np.uint8, np.float64)


def test_order_is_numpys_permutation_of_seed_and_epoch() -> None:
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, 2]))).permutation(50)
    assert (order(50, seed=5, epoch=2, shuffle=True) == expected).all()
    assert (order(50, seed=5, epoch=3, shuffle=True) != expected).any()
    assert order(3, seed=5, epoch=2, shuffle=False).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("x", "y", "said"), [(3, 2, "3 examples, but 2 labels"), (0, 0, "no examples")])
def test_examples_must_fit(x: int, y: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Examples(np.zeros((x, 1)), np.zeros(y))
