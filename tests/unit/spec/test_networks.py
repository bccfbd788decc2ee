"""What is known of networks without MXNet, and the page that tells it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mxdist.errors import SpecError
from mxdist.spec import Model
from mxdist.spec.networks import CATALOGUE, DECODERS, ENCODERS
from support.places import REPOSITORY

PAGE = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")


def test_page_tells_the_sizes() -> None:
    for name, size in {**ENCODERS, **DECODERS}.items():
        count = size.encoder if name in ENCODERS else size.decoder
        numbers = (size.layers, size.units, size.heads, size.hidden, size.vocabulary, size.positions)
        assert f"| `{name}` | {' | '.join(map(str, numbers))} | {count:,} |" in PAGE


def test_page_tells_names_parameters_and_least_sizes() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for name, about in CATALOGUE.items():
        if name in ENCODERS or name in DECODERS:
            continue
        family = name.replace("_v2", "_v1").replace("_bn", "").replace("mobilenetv2_", "mobilenet")
        row = next(row for row in rows if f"`{family}`" in row)
        assert all(f"`{key}`" in row for key in about.params), name
        least, largest = about.sides
        sizes = re.findall(r"\d+x\d+", row.split("|")[4])
        assert sizes == [f"{side}x{side}" for side in (least, largest) if side not in (1, None)], name


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"name": "resnet18"}, "model 'resnet18'; did you mean"),
        (
            {"name": "lenet", "params": {"depth": 3}},
            "depth: lenet has no such parameter; known are classes, batch_norm",
        ),
        ({"name": "lenet", "params": {"hidden": 0}}, "hidden: must be a whole number from 1, not 0"),
        ({"name": "lenet", "params": {"hidden": True}}, "hidden: must be a whole number from 1, not True"),
        ({"name": "resnet18_v1", "params": {"thumbnail": 1}}, "thumbnail: must be true or false, not 1"),
        ({"name": "bert_base", "params": {"dropout": 1.0}}, "dropout: must be a number from 0, less than 1, not 1.0"),
        ({"name": "bert_base", "params": {"units": 100}}, "heads: 12 heads cannot share 100 units equally"),
        ({"name": "gpt2_small", "params": {"classes": 3}}, "classes: gpt2_small has no such parameter"),
    ],
)
def test_what_cannot_be_built_is_refused_before_launch(document: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=re.escape(problem)):
        Model.parse(document)


def test_text_is_cast_to_what_the_network_takes() -> None:
    params = {"hidden": "16", "batch_norm": "true"}
    assert Model.parse({"name": "lenet", "params": params}).params == {"hidden": 16, "batch_norm": True}
    assert Model.parse({"name": "bert_base", "params": {"dropout": "0.1"}}).params == {"dropout": 0.1}
    assert Model.parse({"recipe": "own.py", "params": {"hidden": "16"}}).params == {"hidden": "16"}
