"""Batch normalisation on more than one rank: statistics of the global batch, frozen ones, or a refusal.

``synchronised`` statistics are those that one process would take from the global batch. Each rank describes its rows by
a count, a mean and a sum of squared deviations for each channel; all ranks see all descriptions, and combine them in
the order of the ranks (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979). The backward pass exchanges two sums for each channel in the same way (Ioffe and Szegedy, "Batch
normalization", 2015, section 3)::

    y = (x - mean) / sqrt(var + epsilon)
    dx = (dy - sum(dy) / n - y * sum(dy * y) / n) / sqrt(var + epsilon)

The descriptions travel as a table with one line for each rank, of which a rank fills its own: adding zeros is exact in
any order, so the same training gives the same bits again, however Horovod fuses its messages.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn
from mxnet.gluon.nn.basic_layers import BatchNormReLU, _BatchNorm

from mxdist.errors import Problem, SpecError
from mxdist.runtime import network
from mxdist.runtime.parallel.base import Group
from mxdist.spec.parallelism import BatchNorm, Parallelism, Strategy

_KNOWN = (nn.BatchNorm, BatchNormReLU)
_WHOLE = (Strategy.ALLREDUCE, Strategy.PARAMETER_SERVER)  # each rank has the whole network, once


def settle(net: mx.gluon.Block, parallelism: Parallelism, group: Group) -> None:
    """Give every batch normalisation the statistics that the job asks for, before the network is hybridized.

    Layers that are frozen already stay as they are. Frozen statistics are frozen on one rank as well, so that the
    number of ranks does not change what is trained.

    :raises SpecError: the job asks for none, or for some that this layout does not have.
    """
    names = network.local_batch_norms(net)
    if not names:
        return
    if parallelism.batch_norm is BatchNorm.FROZEN:
        freeze(net)
    elif _sees_whole_batch(parallelism):
        return
    elif parallelism.batch_norm is None:
        raise SpecError("The job", [Problem("parallelism.batch_norm", _refusal(names, parallelism))])
    elif parallelism.strategy not in _WHOLE and not _one_copy_drifts(parallelism):
        kind, strategy = parallelism.batch_norm.value, parallelism.strategy.value
        problem = f"{kind} statistics need strategy allreduce or parameter_server, not {strategy}; use frozen"
        raise SpecError("The job", [Problem("parallelism.batch_norm", problem)])
    elif parallelism.batch_norm is BatchNorm.LOCAL:
        drift(net)
    else:
        synchronise(net, group)


def _sees_whole_batch(parallelism: Parallelism) -> bool:
    """Return whether each layer sees the rows of a global batch all at once."""
    return parallelism.copies * parallelism.accumulate * parallelism.micro_batches == 1


def _one_copy_drifts(parallelism: Parallelism) -> bool:
    """Return whether there is one copy of each layer, with local statistics: those of the micro-batches in turn."""
    return parallelism.batch_norm is BatchNorm.LOCAL and parallelism.copies == 1


def _refusal(names: list[str], parallelism: Parallelism) -> str:
    shown = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
    waits = parallelism.strategy in _WHOLE and parallelism.accumulate == 1 and not parallelism.servers_update
    ways = "synchronised or frozen" if waits else "frozen"
    return (
        f"{shown}: BatchNorm takes its statistics from the rows that it sees at once, here not the global batch, so "
        f"this would train another model than one process does; set batch_norm to {ways}, freeze these layers "
        f"(init.freeze_backbone or init.freeze), use LayerNorm or GroupNorm, or train with {_nearest(parallelism)}"
    )


def _nearest(parallelism: Parallelism) -> str:
    """Return the layout nearest to this one whose layers see the whole global batch at once."""
    if parallelism.staged and parallelism.copies == 1:
        return "micro_batches 1"
    if parallelism.staged:
        return "strategy model, whose stages see the whole batch"
    if parallelism.devices:
        return "strategy allreduce on one rank"
    ways = ["one rank"] if parallelism.world_size > 1 else []
    return " and ".join([*ways, *(["accumulate 1"] if parallelism.accumulate > 1 else [])])


def freeze(net: mx.gluon.Block) -> None:
    """Let every batch normalisation use its running statistics, and not change them; scale and offset still learn."""
    for _, layer in network.layers(net):
        if network.is_batch_norm(layer):
            layer._kwargs["use_global_stats"] = True


def drift(net: mx.gluon.Block) -> None:
    """Let each rank take statistics from its own rows; ``network.LossSum.agree`` makes the running ones equal again."""
    for _, layer in network.layers(net):
        if _local(layer):
            layer.drifts = True


def synchronise(net: mx.gluon.Block, group: Group) -> None:
    """Let every batch normalisation that is not frozen take the statistics of all ranks' rows.

    Parameters keep their names and values. The network then runs imperatively: see ``Synchronised``.

    :raises SpecError: a layer is a batch normalisation of a kind that Gluon does not have.
    """
    if group.size == 1:
        return
    chosen = [(name, layer) for name, layer in network.layers(net) if _local(layer)]
    foreign = [f"{name} is a {type(layer).__name__}" for name, layer in chosen if type(layer) not in _KNOWN]
    if foreign:
        problem = f"{', '.join(foreign[:3])}: only BatchNorm layers of Gluon itself can be synchronised; use frozen"
        raise SpecError("The job", [Problem("parallelism.batch_norm", problem)])
    net.hybridize(active=False)
    for name, layer in chosen:
        if type(layer) is not Synchronised:
            layer.__class__ = Synchronised  # in place: a block may keep its layers in lists that Gluon does not know
            layer._join(name, group)


def _local(layer: mx.gluon.Block) -> bool:
    return network.is_batch_norm(layer) and not layer._kwargs["use_global_stats"]


class Synchronised(_BatchNorm):  # type: ignore[misc]  # mxnet is untyped
    """Gluon's BatchNorm over the rows of all ranks.

    It computes imperatively while it trains. As a graph, and outside of training, it is Gluon's own layer: an exported
    model needs nothing of mxdist. A graph that trains would take local statistics, so hybridizing is refused.
    """

    has_rows: bool
    """Whether what runs through this layer are rows of the batch; see ``network.LossSum.join``."""

    def _join(self, name: str, group: Group) -> None:
        self.has_rows = True
        self._name_there, self._group = name, group
        self._tables: dict[str, mx.nd.NDArray] = {}
        self._follows: bool | None = None

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Refuse to become part of a graph.

        :raises RuntimeError: always, unless it is switched off.
        """
        if active:
            raise RuntimeError("a network with synchronised BatchNorm cannot be hybridized")
        super().hybridize(active, **options)

    def hybrid_forward(self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any) -> Any:
        """Return ``x`` normalised, scaled by ``gamma`` and moved by ``beta``."""
        if F is not mx.nd or not autograd.is_training() or self._kwargs["use_global_stats"]:
            return super().hybrid_forward(F, x, gamma, beta, running_mean, running_var)
        axis = self._kwargs["axis"] % x.ndim
        shape = tuple(-1 if position == axis else 1 for position in range(x.ndim))
        if self._follows is None:
            self._follows = any(part.grad_req != "null" for part in (self.gamma, self.beta)) or _has_gradient(x)
        y = _Normalise(self, axis, (running_mean, running_var) if self._follows else None)(x)
        if not self._kwargs["fix_gamma"]:
            y = mx.nd.broadcast_mul(y, gamma.reshape(shape))
        y = mx.nd.broadcast_add(y, beta.reshape(shape))
        return mx.nd.relu(y) if self.fuse_relu else y

    def exchange(self, kind: str, own: mx.nd.NDArray | None, like: mx.nd.NDArray, width: int) -> mx.nd.NDArray:
        """Return what every rank says, one line a rank.

        The table is the same array at each step: MXNet's engine then lets no exchange begin before the last one of the
        same name has ended.

        :param own: ``width`` numbers; None: this rank has no rows, its line is zeros.
        """
        if kind not in self._tables:
            self._tables[kind] = mx.nd.zeros((self._group.size, width), ctx=like.context, dtype="float64")
        table = self._tables[kind]
        table[:] = 0
        if own is not None:
            table[self._group.rank] = own
        self._group.sum_named_(table, f"mxdist.batch_norm.{self._name_there}.{kind}")
        return table


def _has_gradient(x: mx.nd.NDArray) -> bool:
    """Return whether the backward pass reaches ``x``.

    MXNet on a CPU moves running statistics in the backward pass. A layer with nothing to learn, directly on the inputs
    (the first of the zoo's ResNet v2), keeps its first ones for ever; one rank does so, and therefore many must.
    """
    try:
        autograd.get_symbol(x)
    except mx.MXNetError:
        return False
    return True


class _Normalise(autograd.Function):  # type: ignore[misc]  # mxnet is untyped
    """``(x - mean) / sqrt(var + epsilon)`` with the statistics of all ranks; one input, one output.

    Scale and offset are left to ordinary operators: a ``Function`` of several inputs stops writing gradients at the
    first input that wants none.
    """

    def __init__(self, layer: Synchronised, axis: int, running: tuple[mx.nd.NDArray, mx.nd.NDArray] | None) -> None:
        super().__init__()
        self._layer, self._axis, self._running = layer, axis, running
        self._rows = layer.has_rows  # as it is now: the backward pass runs later

    def forward(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """Return ``x`` normalised; exchanges the statistics."""
        channels = x.shape[self._axis]
        self._over = tuple(position for position in range(x.ndim) if position != self._axis)
        self._shape = tuple(-1 if position == self._axis else 1 for position in range(x.ndim))
        table = self._layer.exchange("forward", self._describe(x) if self._rows else None, x, 2 * channels + 1)
        counts, means, squares = table[:, :1], table[:, 1 : channels + 1], table[:, channels + 1 :]
        self._total = counts.sum()
        mean = mx.nd.broadcast_div(mx.nd.broadcast_mul(counts, means).sum(axis=0), self._total)
        apart = mx.nd.square(mx.nd.broadcast_sub(means, mean.expand_dims(0)))
        squares = squares.sum(axis=0) + mx.nd.broadcast_mul(counts, apart).sum(axis=0)
        variance = mx.nd.broadcast_div(squares, self._total)
        if self._running is not None:
            self._follow(self._running, (mean, variance))
        self._scale = (1 / mx.nd.sqrt(variance + self._layer._kwargs["eps"])).astype(x.dtype).reshape(self._shape)
        centred = mx.nd.broadcast_sub(x, mean.astype(x.dtype).reshape(self._shape))
        self._y = mx.nd.broadcast_mul(centred, self._scale)
        return self._y

    def _describe(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """Return count, means and sums of squared deviations of this rank's rows."""
        mean = x.mean(axis=self._over)
        squares = mx.nd.square(mx.nd.broadcast_sub(x, mean.reshape(self._shape))).sum(axis=self._over)
        count = mx.nd.full((1,), x.size // x.shape[self._axis], ctx=x.context, dtype="float64")
        return mx.nd.concat(count, mean.astype("float64"), squares.astype("float64"), dim=0)

    def _follow(self, running: tuple[mx.nd.NDArray, ...], statistics: tuple[mx.nd.NDArray, ...]) -> None:
        """Move the running statistics; as MXNet does, by the biased variance and a momentum in float32.

        Here, not in ``backward``: that runs in a thread of MXNet, and whoever reads them next must come after.
        """
        momentum = float(np.float32(self._layer._kwargs["momentum"]))
        for kept, new in zip(running, statistics, strict=True):
            kept[:] = kept * momentum + new.astype(kept.dtype) * (1 - momentum)

    def backward(self, dy: mx.nd.NDArray) -> mx.nd.NDArray:
        """Return the gradient with respect to ``x``; exchanges its two sums."""
        channels = dy.shape[self._axis]
        own = None
        if self._rows:
            sums = dy.sum(axis=self._over), (dy * self._y).sum(axis=self._over)
            own = mx.nd.concat(*[each.astype("float64") for each in sums], dim=0)
        table = self._layer.exchange("backward", own, dy, 2 * channels)
        if not self._rows:
            return mx.nd.zeros_like(dy)
        means = mx.nd.broadcast_div(table.sum(axis=0), self._total).astype(dy.dtype)
        first, second = means[:channels].reshape(self._shape), means[channels:].reshape(self._shape)
        return mx.nd.broadcast_mul(mx.nd.broadcast_sub(dy, first) - mx.nd.broadcast_mul(self._y, second), self._scale)
