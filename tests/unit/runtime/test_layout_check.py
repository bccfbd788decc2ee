"""Cuts that a network does not have are refused before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import LaunchError, SpecError
from mxdist.launch.local import LocalLauncher
from mxdist.runtime import layout_check
from mxdist.spec import TrainingJob

DATASET = {"manifest_uri": "s3://data/m.json", "version": "ab" * 32}


def job(model: dict[str, Any], **parallelism: Any) -> TrainingJob:
    return TrainingJob.parse({"name": "cut", "model": model, "dataset": DATASET, "parallelism": parallelism})


def test_wrong_cuts_are_told_all_at_once_before_the_start() -> None:
    wrong = job({"name": "lenet"}, strategy="model", cuts=["features.4", "features.2", "nope"])
    with pytest.raises(SpecError) as caught:
        LocalLauncher(python=sys.executable).check(wrong)
    assert [problem.path for problem in caught.value.problems] == ["parallelism.cuts.1", "parallelism.cuts.2"]


@pytest.mark.parametrize(
    ("model", "layout", "told"),
    [
        ({"name": "mlp"}, {"strategy": "model", "stages": 9}, "for 9 stages"),
        ({"name": "gpt2_small"}, {"strategy": "pipeline", "stages": 2}, "wte and lm_head share a parameter"),
        ({"name": "gpt2_small"}, {"strategy": "pipeline", "cuts": ["h.6"]}, "with model.params.tied false"),
        ({"name": "resnet18_v1"}, {"strategy": "pipeline", "cuts": ["features.5.0.body"]}, "no layer"),
    ],
)
def test_what_a_network_does_not_have(model: dict[str, Any], layout: dict[str, Any], told: str) -> None:
    [(_, message)] = layout_check.problems(job(model, **layout))
    assert told in message


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({"name": "lenet"}, {"strategy": "model", "cuts": ["features.2", "output"]}),
        ({"name": "resnet18_v1"}, {"strategy": "pipeline", "cuts": ["features.5"]}),
        ({"name": "bert_base"}, {"strategy": "pipeline", "stages": 4}),
        ({"name": "gpt2_small", "params": {"tied": False}}, {"strategy": "pipeline", "stages": 4}),
        ({"recipe": "some.module"}, {"strategy": "model", "stages": 2}),
        ({"name": "lenet"}, {"world_size": 2}),
    ],
)
def test_what_can_be_cut(model: dict[str, Any], layout: dict[str, Any]) -> None:
    assert layout_check.problems(job(model, **layout)) == []


def test_a_node_environment_without_mxnet_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: mxnet' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match="ModuleNotFoundError: mxnet"):
        LocalLauncher(python=str(python)).check(job({"name": "lenet"}, strategy="model", stages=2))
