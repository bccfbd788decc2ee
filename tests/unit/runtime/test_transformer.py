"""Transformers against numpy: attention, the whole decoder, what must not be seen, sizes, names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from parallel.inprocess import trainer_of
from parallel.worlds import jobs

from mxdist.errors import SpecError
from mxdist.runtime import finetune, models, network
from mxdist.runtime.models import transformer
from mxdist.spec import DType, Init
from mxdist.spec.networks import DECODERS, ENCODERS

SIZE = {"layers": 2, "units": 8, "heads": 2, "hidden": 12, "vocabulary": 20, "positions": 9}


def net_of(name: str, *, dtype: DType = DType.FLOAT64, **params: Any) -> Any:
    """Return a small network with weights that are far from zero."""
    net = models.build(name, {**SIZE, **params})
    network.prepare(net, dtype=dtype, device=mx.cpu())
    generator = np.random.RandomState(2)
    for parameter in network.parameters(net).values():
        parameter.set_data(mx.nd.array(generator.randn(*parameter.shape) * 0.5, dtype=dtype.value))
    return net


def ids(*rows: list[int], dtype: str = "float64") -> mx.nd.NDArray:
    """Return token ids as a network takes them."""
    return mx.nd.array(rows, dtype=dtype)


def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax of the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, *, causal: bool) -> np.ndarray:
    """Return attention, query by query and head by head."""
    out, width = np.zeros_like(q), q.shape[-1] // heads
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for query in range(len(q)):
            keys = slice(0, query + 1 if causal else None)
            weights = softmax(k[keys, part] @ q[query, part] / math.sqrt(width))
            out[query, part] = weights @ v[keys, part]
    return out


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 1e-5)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_papers(dtype: str, bound: float, causal: bool) -> None:
    q, k, v = np.random.RandomState(0).randn(3, 2, 5, 12)
    arrays = [mx.nd.array(each, dtype=dtype) for each in (q, k, v)]
    hidden = transformer.future(mx.nd, mx.nd.zeros((2, 5), dtype=dtype)) if causal else None
    found = transformer.attend(mx.nd, *arrays, heads=3, width=4, hidden=hidden, rate=0.0).asnumpy()
    expected = np.stack([attention(*rows, heads=3, causal=causal) for rows in zip(q, k, v, strict=True)])
    assert found.dtype == dtype
    assert np.abs(found - expected).max() < bound


def norm(p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """Normalise the last axis."""
    scale = np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    return (x - x.mean(axis=-1, keepdims=True)) / scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def gpt2(p: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Return the scores of one sequence, by GPT-2's formulas."""

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["wte.weight"][tokens] + p["wpe.weight"][: len(tokens)]
    for block in range(SIZE["layers"]):
        q, k, v = np.split(linear(f"h.{block}.attn.c_attn", norm(p, f"h.{block}.ln_1", x)), 3, axis=-1)
        x = x + linear(f"h.{block}.attn.c_proj", attention(q, k, v, SIZE["heads"], causal=True))
        inner = linear(f"h.{block}.mlp.c_fc", norm(p, f"h.{block}.ln_2", x))
        inner = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear(f"h.{block}.mlp.c_proj", inner)
    return norm(p, "ln_f", x) @ p.get("lm_head.weight", p["wte.weight"]).T


@pytest.mark.parametrize(("hybrid", "tied"), [(False, True), (True, True), (False, False)])
def test_decoder_is_gpt2(hybrid: bool, tied: bool) -> None:
    net = net_of("transformer_decoder", tied=tied)
    if hybrid:
        net.hybridize(static_alloc=True, static_shape=True)
    arrays = {name: array.asnumpy() for name, array in network.arrays(net).items()}
    assert ("lm_head.weight" in arrays) is not tied
    rows = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]]
    found = net(ids(*rows)).asnumpy()
    assert np.abs(found - np.stack([gpt2(arrays, row) for row in rows])).max() < 1e-11


@pytest.mark.parametrize(("dtype", "pre_norm"), [(DType.FLOAT64, True), (DType.FLOAT32, False)])
def test_later_tokens_change_nothing_before_them(dtype: DType, pre_norm: bool) -> None:
    net = net_of("transformer_decoder", dtype=dtype, pre_norm=pre_norm)
    first = net(ids([3, 1, 4, 1, 5, 9], dtype=dtype.value)).asnumpy()
    second = net(ids([3, 1, 4, 1, 7, 9], dtype=dtype.value)).asnumpy()
    assert (first[:, :4] == second[:, :4]).all()
    assert (first[:, 4:] != second[:, 4:]).any(axis=-1).all()


@pytest.mark.parametrize("pre_norm", [False, True])
def test_padding_changes_nothing(pre_norm: bool) -> None:
    net = net_of("transformer_encoder", classes=3, pad_id=0, pre_norm=pre_norm)
    alone, padded = net(ids([3, 1, 4])).asnumpy(), net(ids([3, 1, 4, 0, 0, 0])).asnumpy()
    assert np.abs(alone - padded).max() < 1e-13
    without = net_of("transformer_encoder", classes=3, pre_norm=pre_norm)
    assert np.abs(alone - without(ids([3, 1, 4, 0, 0, 0])).asnumpy()).max() > 1e-3


def test_padding_of_a_decoder_is_neither_seen_nor_counted() -> None:
    net, loss = net_of("transformer_decoder", pad_id=0), models.TokenLoss(0)
    short = loss(net(ids([3, 1, 4])), ids([1, 4, 2])).asnumpy()
    padded = loss(net(ids([3, 1, 4, 0, 0])), ids([1, 4, 2, 0, 0])).asnumpy()
    assert np.abs(short - padded).max() < 1e-13
    assert loss(net(ids([3, 0])), ids([0, 0])).asnumpy().tolist() == [0]


def test_loss_of_tokens_is_their_mean_cross_entropy() -> None:
    scores, target = np.random.RandomState(1).randn(2, 3, 5), np.array([[0, 4, 2], [1, 1, 3]])
    expected = -np.log(softmax(scores))[np.arange(2)[:, None], np.arange(3), target].mean(axis=1)
    found = models.TokenLoss()(mx.nd.array(scores, dtype="float64"), mx.nd.array(target, dtype="float64"))
    assert np.abs(found.asnumpy() - expected).max() < 1e-13


def test_gradients_are_those_of_finite_differences() -> None:
    """Through both uses of the decoder's embedding."""
    net, loss, x, y = net_of("transformer_decoder"), models.TokenLoss(), ids([3, 1, 4, 1]), ids([1, 4, 1, 5])
    with mx.autograd.record():
        value = loss(net(x), y)
    value.backward()
    for name in ("wte.weight", "wpe.weight", "h.0.attn.c_attn.weight", "h.1.mlp.c_fc.bias"):
        parameter = network.parameters(net)[name]
        values, gradient = parameter.data().asnumpy(), parameter.grad().asnumpy()
        where = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = values.copy()
            moved[where] += step
            parameter.set_data(mx.nd.array(moved, dtype="float64"))
            ends.append(float(loss(net(x), y).asscalar()))
        parameter.set_data(mx.nd.array(values, dtype="float64"))
        assert abs((ends[0] - ends[1]) / 2e-5 - gradient[where]) < 1e-7


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bert_base", 109_482_240),
        ("bert_large", 335_141_888),
        ("gpt2_small", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_sizes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    """The numbers that the published checkpoints have; of BERT with its pooler."""
    assert (ENCODERS[name].encoder if name in ENCODERS else DECODERS[name].decoder) == count
    net = models.build(name, {"classes": 1} if name in ENCODERS else {})  # its arrays are not made
    made = sum(int(np.prod(parameter.shape)) for parameter in network.parameters(net).values())
    assert made - (ENCODERS[name].units + 1 if name in ENCODERS else 0) == count  # less one class


def test_names_are_the_standard_ones() -> None:
    names = set(network.parameters(models.build("transformer_encoder", {**SIZE, "classes": 3})))
    assert {
        "embeddings.word_embeddings.weight",
        "embeddings.position_embeddings.weight",
        "embeddings.token_type_embeddings.weight",
        "embeddings.LayerNorm.weight",
        "encoder.layer.0.attention.self.query.weight",
        "encoder.layer.1.attention.self.value.bias",
        "encoder.layer.0.attention.output.dense.weight",
        "encoder.layer.0.attention.output.LayerNorm.bias",
        "encoder.layer.0.intermediate.dense.weight",
        "encoder.layer.0.output.dense.weight",
        "encoder.layer.0.output.LayerNorm.weight",
        "pooler.dense.weight",
        "classifier.weight",
    } <= names
    decoder = network.parameters(models.build("transformer_decoder", SIZE))
    assert {name for name in decoder if not name.startswith("h.")} == {
        "wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias",
    }  # fmt: skip
    assert decoder["h.1.attn.c_attn.weight"].shape == (8, 24)
    assert decoder["h.1.mlp.c_proj.weight"].shape == (12, 8)


def test_heads_must_share_the_units() -> None:
    with pytest.raises(SpecError, match="model.params.heads: 3 heads cannot share 8 units equally"):
        models.build("transformer_decoder", {**SIZE, "heads": 3})


@pytest.mark.parametrize(("rate", "random"), [(0.0, False), (0.1, True)])
def test_dropout_is_in_the_graph_only_when_asked_for(rate: float, random: bool) -> None:
    for name, more in (("transformer_encoder", {"classes": 2}), ("transformer_decoder", {})):
        net = models.build(name, {**SIZE, **more, "dropout": rate})
        assert bool(network.random_ops(net(mx.sym.var("data")))) is random


def test_bytes_are_token_ids_and_not_scaled(tmp_path: Path) -> None:
    """A decoder learns to count, from bytes; the exported model takes the same bytes."""
    x = (np.arange(40)[:, None] + np.arange(6)) % 20
    small = jobs(tmp_path, {"train": (x.astype(np.uint8), np.zeros(40, dtype=np.int64))})
    model = {"name": "transformer_decoder", "params": SIZE}
    trainer = trainer_of(small, "count", model=model, epochs=30, optimizer={"name": "adam", "learning_rate": 0.01})
    result = trainer.run().result
    assert result["metrics"]["train_loss"] < 1.0 < math.log(20)
    scores = trainer.setup.forward(mx.nd.array(x[:1, :-1], dtype="uint8")).asnumpy()
    assert scores.shape == (1, 5, 20)
    assert trainer.setup.labels is None
    from mxdist.runtime.pyfunc_model import Predictor

    assert np.abs(Predictor(result["model_dir"]).predict(x[:1, :-1]) - scores).max() < 1e-12


def test_a_decoder_has_no_head_to_replace() -> None:
    net = net_of("transformer_decoder")
    source = finetune.Source("/m", "d", {"label_digest": finetune.label_digest(None)}, finetune.as_arrays(net))
    with pytest.raises(SpecError, match="init.head: this network has no output layer of its own"):
        finetune.load(net, Init.parse({"model_uri": "/m", "head": "replace"}), source, labels=None)
