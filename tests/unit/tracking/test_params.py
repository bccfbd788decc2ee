"""One text per value."""

from __future__ import annotations

import hashlib
import json

import pytest

from mxdist.spec import TrainingJob
from mxdist.tracking.params import canonical, job_params, public, shortened


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((True, "true"), (False, "false"), (7, "7"), (7.0, "7"), (0.1, "0.1"), (1e-5, "1e-05"), (-0.0, "0")),
        *((1e300, "1e+300"), (2**60, "1152921504606846976"), ("7.0", "7.0"), ("0.10", "0.10"), ("", "")),
        *(([1, 2], "[1,2]"), ({"b": 1, "a": "é"}, '{"a":"é","b":1}')),
    ],
    ids=repr,
)
def test_canonical(value: object, text: str) -> None:
    assert canonical(value) == text


def test_a_long_value_is_replaced_by_its_digest() -> None:
    hosts = ",".join(f"node{n}" for n in range(900))
    assert (
        shortened(hosts)
        == f"sha256:{hashlib.sha256(hosts.encode()).hexdigest()} ({len(hosts)} characters, see config.json)"
    )
    assert shortened("x" * 500) == "x" * 500


def test_the_parameters_of_a_job() -> None:
    script = {"path": "train.py", "args": ["--epochs", "2"], "env": {"TOKEN": "hush"}}
    job = TrainingJob.parse(
        {"name": "a", "script": script, "optimizer": {"learning_rate": "0.10"}, "tracking": {"uri": "http://m"}}
    )
    params = job_params(job.to_document(), {"cores": [0, 1], "threads": 1})
    assert params["optimizer.learning_rate"] == "0.1"
    assert params["script.args"] == '["--epochs","2"]'
    assert params["script.env"] == '["TOKEN"]'
    assert params["cores"] == "[0,1]"
    assert params["shuffle"] == "true"
    assert "hush" not in json.dumps([params, public(job.to_document())])
    assert not [key for key in params if key.startswith(("tracking", "storage", "kind", "model", "limits.deadline_s"))]
