"""Transformers over token ids: an encoder that classifies (BERT), a decoder that predicts the next token (GPT-2).

Parameters have the names, and the encoder's and decoder's matrices the shapes, that ``BertModel`` and ``GPT2Model`` of
Hugging Face's ``transformers`` give them: ``encoder.layer.0.attention.self.query.weight``, ``h.0.attn.c_attn.weight``.

Sources: Vaswani et al., "Attention is all you need", 2017; Devlin et al., "BERT", 2019; Radford et al., "Language
models are unsupervised multitask learners", 2019 (normalisation before each part, and after the last block).
Weights start from a normal distribution of deviation 0.02, biases from zero, as in both papers' code. GPT-2's smaller
start of the layers that write into the residual stream is kept: deviation 0.02 / sqrt(2 * layers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mxnet as mx
from mxnet.gluon import nn

from mxdist.spec.networks import Size

_DEVIATION = 0.02
_HIDDEN = -1e9
"""Added to the score of a key that must not be seen: its weight is then exactly zero, in float32 and in float64."""


class LayerNorm(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """Normalisation over the last axis, with the parameter names ``weight`` and ``bias``."""

    def __init__(self, units: int, epsilon: float) -> None:
        super().__init__()
        self._epsilon = epsilon
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(units,), init="ones")
            self.bias = self.params.get("bias", shape=(units,), init="zeros")

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any) -> Any:
        """Return ``x`` normalised, in its own shape."""
        return F.LayerNorm(x, weight, bias, axis=-1, eps=self._epsilon)


class Linear(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """``x @ weight + bias`` over the last axis: GPT-2's layers keep their matrices as (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, deviation: float = _DEVIATION) -> None:
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(inputs, outputs), init=mx.init.Normal(deviation))
            self.bias = self.params.get("bias", shape=(outputs,), init="zeros")

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any) -> Any:
        """Return (..., outputs)."""
        return F.broadcast_add(F.dot(x, weight), bias)


class Container(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """Layers by name, used by the block above: it gives parameters their standard names, and computes nothing."""

    def __init__(self, /, **layers: mx.gluon.HybridBlock) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


class Part(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """What a network does with one of its blocks, as a block of its own.

    :param compute: called with mx.nd or mx.sym, and the inputs.
    """

    takes_inputs = False

    def __init__(self, compute: Callable[..., Any], block: mx.gluon.HybridBlock) -> None:
        super().__init__()
        self._compute = compute
        self.block = block

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:
        """Return what the network would."""
        return self._compute(F, *inputs)


def dense(units: int, inputs: int, **options: Any) -> nn.Dense:
    """Return a fully connected layer over the last axis; its weight is (outputs, inputs)."""
    return nn.Dense(units, in_units=inputs, flatten=False, weight_initializer=mx.init.Normal(_DEVIATION), **options)


def embedding(count: int, units: int) -> nn.Embedding:
    """Return a table of ``count`` rows; ids may be floats, exact up to 2^24 in float32."""
    return nn.Embedding(count, units, weight_initializer=mx.init.Normal(_DEVIATION))


def dropout(F: Any, x: Any, rate: float) -> Any:
    """Return ``x`` with some of it dropped while training; without a rate, no random operator is in the graph."""
    return F.Dropout(x, p=rate) if rate else x


def attend(F: Any, query: Any, key: Any, value: Any, *, heads: int, width: int, hidden: Any, rate: float) -> Any:
    """Return softmax(query key^T / sqrt(width) + hidden) value for each head: (rows, tokens, units).

    :param query, key, value: (rows, tokens, units).
    :param width: of one head.
    :param hidden: what to add to the scores (rows or 1, 1, tokens or 1, tokens), or None.
    """
    # rows and heads are one axis: batch_dot takes no more
    query, key, value = (_split(F, each, heads) for each in (query, key, value))
    scores = F.batch_dot(query, key, transpose_b=True) / math.sqrt(width)
    if hidden is not None:
        scores = F.reshape(scores, shape=(-4, -1, heads, 0, 0))
        scores = F.reshape(F.broadcast_add(scores, hidden), shape=(-3, -2))
    weights = dropout(F, F.softmax(scores, axis=-1), rate)
    found = F.reshape(F.batch_dot(weights, value), shape=(-4, -1, heads, 0, 0))
    return F.reshape(F.transpose(found, axes=(0, 2, 1, 3)), shape=(0, 0, -3))


def _split(F: Any, x: Any, heads: int) -> Any:
    """Return (rows * heads, tokens, width of a head)."""
    return F.reshape(F.transpose(F.reshape(x, shape=(0, 0, heads, -1)), axes=(0, 2, 1, 3)), shape=(-3, -2))


def padding(F: Any, tokens: Any, pad_id: int) -> Any:
    """Return what hides the keys that are padding: (rows, 1, 1, tokens)."""
    return F.expand_dims(F.expand_dims((tokens == pad_id) * _HIDDEN, axis=1), axis=1)


def future(F: Any, tokens: Any) -> Any:
    """Return what hides the keys that come after a query: (1, 1, tokens, tokens)."""
    positions = F.contrib.arange_like(tokens, axis=1)
    later = F.broadcast_greater(F.expand_dims(positions, axis=0), F.expand_dims(positions, axis=1))
    return F.expand_dims(F.expand_dims(later * _HIDDEN, axis=0), axis=0)


class EncoderLayer(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """Attention over all tokens, then a feed-forward part; each is added to its input."""

    def __init__(self, size: Size, rate: float, pre_norm: bool) -> None:
        super().__init__()
        units = size.units
        self._heads, self._width = size.heads, size.units // size.heads
        self._rate, self._pre_norm = rate, pre_norm
        with self.name_scope():
            own = {name: dense(units, units) for name in ("query", "key", "value")}
            self.attention = Container(**{"self": Container(**own)}, output=_output(units, units))
            self.intermediate = Container(dense=dense(size.hidden, units))
            self.output = _output(units, size.hidden)

    def hybrid_forward(self, F: Any, x: Any, hidden: Any = None) -> Any:
        """Return (rows, tokens, units)."""
        x = self._add(F, x, self.attention.output, lambda y: self._attend(F, y, hidden))
        return self._add(F, x, self.output, lambda y: gelu(F, self.intermediate.dense(y)))

    def _attend(self, F: Any, x: Any, hidden: Any) -> Any:
        own = self.attention.self
        parts = own.query(x), own.key(x), own.value(x)
        return attend(F, *parts, heads=self._heads, width=self._width, hidden=hidden, rate=self._rate)

    def _add(self, F: Any, x: Any, output: Container, inner: Any) -> Any:
        if self._pre_norm:
            return x + dropout(F, output.dense(inner(output.LayerNorm(x))), self._rate)
        return output.LayerNorm(x + dropout(F, output.dense(inner(x)), self._rate))


def _output(units: int, inputs: int) -> Container:
    return Container(dense=dense(units, inputs), LayerNorm=LayerNorm(units, 1e-12))


class Encoder(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """BERT: all tokens see each other; the first token's place classifies.

    :param classes: outputs.
    :param dropout: the rate after embeddings, attention and each part; 0.1 in the paper.
    :param pad_id: tokens of this id are not seen; None: all are.
    :param pre_norm: normalise before each part instead of after it; the paper does it after.
    """

    def __init__(
        self, size: Size, classes: int, *, dropout: float = 0.0, pad_id: int | None = None, pre_norm: bool = False
    ) -> None:
        super().__init__()
        units = size.units
        self._rate, self._pad_id = dropout, pad_id
        with self.name_scope():
            self.embeddings = Container(
                word_embeddings=embedding(size.vocabulary, units),
                position_embeddings=embedding(size.positions, units),
                token_type_embeddings=embedding(2, units),
                LayerNorm=LayerNorm(units, 1e-12),
            )
            layers = nn.HybridSequential()
            layers.add(*[EncoderLayer(size, dropout, pre_norm) for _ in range(size.layers)])
            self.encoder = Container(layer=layers)
            self.pooler = Container(dense=dense(units, units, activation="tanh"))
            self.classifier = dense(classes, units)

    def hybrid_forward(self, F: Any, tokens: Any) -> Any:
        """Return one score for each class, (rows, classes), of token ids (rows, tokens)."""
        return self._classify(F, self._pool(F, self.sequence(F, tokens)))

    def chain(self) -> list[tuple[str, mx.gluon.HybridBlock]]:
        """Return the parts that a pipeline may cut between; what hides padding is made again from the tokens."""
        layers = [
            (
                f"encoder.layer.{number}",
                Part(lambda F, x, *tokens, layer=layer: layer(x, *self._hide(F, *tokens)), layer),
            )
            for number, layer in enumerate(self.encoder.layer)
        ]
        for _, part in layers:
            part.takes_inputs = self._pad_id is not None
        ends = [("pooler", Part(self._pool, self.pooler)), ("classifier", Part(self._classify, self.classifier))]
        return [("embeddings", Part(self._embed, self.embeddings)), *layers, *ends]

    def _hide(self, F: Any, *tokens: Any) -> tuple[Any, ...]:
        return () if self._pad_id is None else tuple(padding(F, each, self._pad_id) for each in tokens)

    def _pool(self, F: Any, x: Any) -> Any:
        return self.pooler.dense(F.reshape(F.slice_axis(x, axis=1, begin=0, end=1), shape=(0, -1)))

    def _classify(self, F: Any, x: Any) -> Any:
        return self.classifier(dropout(F, x, self._rate))

    def sequence(self, F: Any, tokens: Any) -> Any:
        """Return the last layer's output, (rows, tokens, units)."""
        x = self._embed(F, tokens)
        hidden = self._hide(F, tokens)
        for layer in self.encoder.layer:
            x = layer(x, *hidden)
        return x

    def _embed(self, F: Any, tokens: Any) -> Any:
        known = self.embeddings
        x = known.word_embeddings(tokens) + known.token_type_embeddings(F.zeros_like(tokens))
        x = F.broadcast_add(x, F.expand_dims(known.position_embeddings(F.contrib.arange_like(tokens, axis=1)), axis=0))
        return dropout(F, known.LayerNorm(x), self._rate)


class DecoderLayer(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """Attention over what came before, then a feed-forward part; each is added to its input."""

    def __init__(self, size: Size, rate: float, pre_norm: bool) -> None:
        super().__init__()
        units, small = size.units, _DEVIATION / math.sqrt(2 * size.layers)
        self._heads, self._width = size.heads, size.units // size.heads
        self._rate, self._pre_norm = rate, pre_norm
        with self.name_scope():
            self.ln_1 = LayerNorm(units, 1e-5)
            self.attn = Container(c_attn=Linear(units, 3 * units), c_proj=Linear(units, units, small))
            self.ln_2 = LayerNorm(units, 1e-5)
            self.mlp = Container(c_fc=Linear(units, size.hidden), c_proj=Linear(size.hidden, units, small))

    def hybrid_forward(self, F: Any, x: Any, hidden: Any) -> Any:
        """Return (rows, tokens, units)."""
        x = self._add(F, x, self.ln_1, lambda y: self._attend(F, y, hidden))
        return self._add(F, x, self.ln_2, lambda y: self.mlp.c_proj(gelu_tanh(F, self.mlp.c_fc(y))))

    def _attend(self, F: Any, x: Any, hidden: Any) -> Any:
        parts = F.split(self.attn.c_attn(x), num_outputs=3, axis=2)
        return self.attn.c_proj(attend(F, *parts, heads=self._heads, width=self._width, hidden=hidden, rate=self._rate))

    def _add(self, F: Any, x: Any, norm: LayerNorm, inner: Any) -> Any:
        if self._pre_norm:
            return x + dropout(F, inner(norm(x)), self._rate)
        return norm(x + dropout(F, inner(x), self._rate))


def gelu(F: Any, x: Any) -> Any:
    """Return GELU as BERT has it: x (1 + erf(x / sqrt(2))) / 2; MXNet's own is right to 1e-7 only, also in float64."""
    return 0.5 * x * (1 + F.erf(x / math.sqrt(2)))


def gelu_tanh(F: Any, x: Any) -> Any:
    """Return GELU as GPT-2 has it: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1 + F.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


class Decoder(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """GPT-2: each token sees those before it, and predicts the next one.

    :param dropout: the rate after embeddings, attention and each part; 0.1 in GPT-2's code.
    :param pad_id: tokens of this id are not seen; ``TokenLoss`` does not count them either.
    :param pre_norm: normalise before each part, as GPT-2 does; else after it, as the first GPT did.
    :param tied: the output layer is the embedding again, as in GPT-2; else it has a matrix of its own.
    """

    def __init__(
        self,
        size: Size,
        *,
        dropout: float = 0.0,
        pad_id: int | None = None,
        pre_norm: bool = True,
        tied: bool = True,
    ) -> None:
        super().__init__()
        units = size.units
        self._rate, self._pad_id = dropout, pad_id
        with self.name_scope():
            self.wte = embedding(size.vocabulary, units)
            self.wpe = embedding(size.positions, units)
            self.h = nn.HybridSequential()
            self.h.add(*[DecoderLayer(size, dropout, pre_norm) for _ in range(size.layers)])
            self.ln_f = LayerNorm(units, 1e-5)
            self.lm_head = dense(size.vocabulary, units, use_bias=False, params=self.wte.params if tied else None)

    def hybrid_forward(self, F: Any, tokens: Any) -> Any:
        """Return one score for each token that may come next, (rows, tokens, vocabulary), of ids (rows, tokens)."""
        x, hidden = self._embed(F, tokens), self._hide(F, tokens)
        for layer in self.h:
            x = layer(x, hidden)
        return self.lm_head(self.ln_f(x))

    def chain(self) -> list[tuple[str, mx.gluon.HybridBlock]]:
        """Return the parts that a pipeline may cut between; what hides tokens is made again from them."""
        layers = [
            (f"h.{number}", Part(lambda F, x, tokens, layer=layer: layer(x, self._hide(F, tokens)), layer))
            for number, layer in enumerate(self.h)
        ]
        for _, part in layers:
            part.takes_inputs = True
        first = Part(self._embed, Container(wte=self.wte, wpe=self.wpe))
        return [("wte", first), *layers, ("ln_f", self.ln_f), ("lm_head", self.lm_head)]

    def _embed(self, F: Any, tokens: Any) -> Any:
        x = F.broadcast_add(self.wte(tokens), F.expand_dims(self.wpe(F.contrib.arange_like(tokens, axis=1)), axis=0))
        return dropout(F, x, self._rate)

    def _hide(self, F: Any, tokens: Any) -> Any:
        hidden = future(F, tokens)
        return hidden if self._pad_id is None else F.broadcast_minimum(hidden, padding(F, tokens, self._pad_id))


class TokenLoss(nn.HybridBlock):  # type: ignore[misc]  # mxnet is untyped
    """Cross entropy of the next token: for each example, the mean over its tokens.

    :param pad_id: targets of this id do not count; an example of nothing else has a loss of zero.
    """

    def __init__(self, pad_id: int | None = None) -> None:
        super().__init__()
        self._pad_id = pad_id

    def hybrid_forward(self, F: Any, scores: Any, target: Any) -> Any:
        """Return (rows,) of scores (rows, tokens, vocabulary) and token ids (rows, tokens)."""
        losses = -F.pick(F.log_softmax(scores, axis=-1), target, axis=-1)
        if self._pad_id is None:
            return F.mean(losses, axis=1)
        counts = target != self._pad_id
        return F.sum(losses * counts, axis=1) / F.maximum(F.sum(counts, axis=1), 1)
