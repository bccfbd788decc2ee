"""What failures mean, as a job says it."""

from __future__ import annotations

import pytest

from mxdist.errors import SpecError
from mxdist.spec import TrainingJob

SCRIPT = {"name": "job", "script": {"path": "train.py"}}


def test_every_wrong_policy_is_told_at_once() -> None:
    wrong = [
        {"then": "fail"},
        {"pattern": "(", "then": "restart"},
        {"pattern": ".*", "then": "restart"},
        {"exit_code": 300, "then": "restart"},
        {"exit_code": 3},
        {"exit_code": 3, "then": "avoid_hosts"},
        {"exit_code": 0, "then": "retry"},
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
            "has not failed",
        ]
    ):
        assert f"failures.{number}" in told
        assert words in told


def test_policies_do_not_decide_the_weights() -> None:
    plain = TrainingJob.parse(SCRIPT)
    told = TrainingJob.parse({**SCRIPT, "failures": [{"exit_code": 3, "then": "fail"}]})
    assert plain.training_digest() == told.training_digest()
