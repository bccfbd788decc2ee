"""What failures mean: known by an exit code, by words of a log, or by both."""

from __future__ import annotations

from typing import Any

import pytest

from mxdist.errors import SpecError
from mxdist.spec import FailurePolicy, TrainingJob

SCRIPT = {"name": "job", "script": {"path": "train.py"}}
LOG = "step 3\nCUDA: an illegal memory access was encountered\nlast words"


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"exit_code": 17}, True),
        ({"exit_code": 1}, False),
        ({"pattern": "illegal memory"}, True),
        ({"pattern": "^last"}, True),
        ({"pattern": "out of memory"}, False),
        ({"exit_code": 17, "pattern": "illegal memory"}, True),
        ({"exit_code": 1, "pattern": "illegal memory"}, False),
        ({"exit_code": 17, "pattern": "out of memory"}, False),
    ],
)
def test_both_must_fit_if_both_are_given(fields: dict[str, Any], fits: bool) -> None:
    assert FailurePolicy.parse({**fields, "then": "fail"}).fits(17, LOG) is fits


def test_every_wrong_policy_is_told_at_once() -> None:
    wrong = [
        {"then": "fail"},
        {"pattern": "(", "then": "restart"},
        {"pattern": ".*", "then": "restart"},
        {"exit_code": 300, "then": "restart"},
        {"exit_code": 3},
        {"exit_code": 3, "then": "avoid_hosts"},
    ]
    with pytest.raises(SpecError) as caught:
        TrainingJob.parse({**SCRIPT, "failures": wrong})
    told = str(caught.value)
    for number, words in enumerate(
        [
            "give an exit_code, a pattern, or both",
            "is no regular expression",
            "fits everything, even an empty log",
            "exit_code",
            "then",
            "then",
        ]
    ):
        assert f"failures.{number}" in told
        assert words in told


def test_policies_do_not_decide_the_weights() -> None:
    plain = TrainingJob.parse(SCRIPT)
    told = TrainingJob.parse({**SCRIPT, "failures": [{"exit_code": 3, "then": "fail"}]})
    assert plain.training_digest() == told.training_digest()
