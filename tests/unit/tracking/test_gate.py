"""The gate, case by case."""

from __future__ import annotations

import json
import math

import pytest

from mxdist.errors import SpecError
from mxdist.tracking.gate import Rule, Scores, decide


def scores(
    accuracy: float | None = 0.9,
    *,
    data: str = "d1",
    as_of: str | None = "2026-04-01",
    trained_on: str = "",
    **more: float,
) -> Scores:
    metrics = more if accuracy is None else {"accuracy": accuracy, **more}
    return Scores(metrics, data, as_of, trained_on)


RULE = Rule("accuracy")


@pytest.mark.parametrize(
    ("challenger", "champion", "rule"),
    [
        pytest.param(scores(0.91), scores(0.9), RULE, id="better"),
        pytest.param(scores(0.1), None, RULE, id="first"),
        pytest.param(scores(0.97), scores(0.96), Rule("accuracy", margin=0.01), id="better-by-just-the-margin"),
        pytest.param(scores(0.3), scores(0.2), Rule("accuracy", margin=0.1), id="margin-that-binary-floats-would-miss"),
        pytest.param(scores(loss=0.1), scores(loss=0.2), Rule("loss", higher_is_better=False), id="lower-is-better"),
        pytest.param(scores(0.91, as_of=None), scores(0.9, as_of=None), RULE, id="nobody-knows-any-age"),
        pytest.param(
            scores(0.91, as_of="2026-04-01T02:00:00+02:00"), scores(as_of="2026-04-01"), RULE, id="same-moment"
        ),
        pytest.param(scores(0.91, as_of="2026-04-01T00:00:00Z"), scores(as_of="2026-03-01"), RULE, id="newer"),
        pytest.param(
            scores(0.91, as_of="2026-03-01", trained_on="v1"), scores(trained_on="v1"), RULE, id="same-training-data"
        ),
        pytest.param(
            scores(0.91, as_of=None, trained_on="v1"), scores(trained_on="v1"), RULE, id="same-training-data-no-age"
        ),
    ],
)
def test_promotes(challenger: Scores, champion: Scores | None, rule: Rule) -> None:
    decision = decide(challenger, champion, rule)
    assert decision.promote, decision.reason
    assert not decision.forced


REFUSALS = [
    pytest.param(scores(0.9), scores(0.9), RULE, "0.9 does not beat the champion's 0.9", id="equal"),
    pytest.param(scores(0.8), scores(0.9), RULE, "0.8 does not beat the champion's 0.9", id="worse"),
    pytest.param(scores(0.905), scores(0.9), Rule("accuracy", margin=0.01), "by 0.01", id="within-the-margin"),
    pytest.param(scores(math.nan), scores(0.9), RULE, "challenger's accuracy is nan", id="nan"),
    pytest.param(Scores({"accuracy": None}, "d1"), scores(0.9), RULE, "accuracy is not finite", id="none-of-json"),
    pytest.param(scores(math.inf), scores(0.9), RULE, "challenger's accuracy is inf", id="inf"),
    pytest.param(scores(math.nan), None, RULE, "challenger's accuracy is nan", id="nan-as-the-first"),
    pytest.param(scores(0.9), scores(math.nan), RULE, "champion's accuracy is nan", id="champion-nan"),
    pytest.param(scores(None, loss=1.0), scores(0.9), RULE, "challenger has no accuracy (it has: loss)", id="absent"),
    pytest.param(scores(0.9), scores(None), RULE, "champion has no accuracy", id="champion-lacks-it"),
    pytest.param(
        scores(0.95, data="d2"), scores(0.9), RULE, "different data (challenger d2, champion d1)", id="other-data"
    ),
    pytest.param(scores(0.95, as_of="2026-03-01"), scores(0.9), RULE, "older data (as of 2026-03-01", id="older"),
    pytest.param(scores(0.95, as_of=None), scores(0.9), RULE, "nobody knows how old", id="age-unknown"),
    pytest.param(
        scores(0.95, as_of="2026-03-01", trained_on="v0"), scores(trained_on="v1"), RULE, "older data", id="backfill"
    ),
    pytest.param(scores(0.9, trained_on="v1"), scores(0.9, trained_on="v1"), RULE, "0.9 does not", id="equal-on-same"),
    pytest.param(scores(0.95, as_of="last week"), scores(0.9), RULE, "as_of is no date", id="no-date"),
    pytest.param(
        scores(loss=0.3), scores(loss=0.2), Rule("loss", higher_is_better=False), "lower is better", id="reversed-worse"
    ),
    pytest.param(None, scores(0.9), RULE, "no challenger", id="no-challenger"),
]


@pytest.mark.parametrize(("challenger", "champion", "rule", "reason"), REFUSALS)
def test_refuses_with_the_numbers(challenger: Scores | None, champion: Scores | None, rule: Rule, reason: str) -> None:
    decision = decide(challenger, champion, rule)
    assert not decision.promote
    assert reason in decision.reason
    assert json.dumps(dict(decision.numbers), allow_nan=False)


@pytest.mark.parametrize(("challenger", "champion", "rule", "reason"), REFUSALS[:-1])
def test_force_is_recorded(challenger: Scores, champion: Scores | None, rule: Rule, reason: str) -> None:
    decision = decide(challenger, champion, Rule(rule.metric, rule.higher_is_better, rule.margin, force=True))
    assert decision.promote
    assert decision.forced
    assert decision.reason.startswith("forced, although")
    assert reason in decision.reason


def test_force_without_need_is_not_called_forced() -> None:
    assert not decide(scores(0.95), scores(0.9), Rule("accuracy", force=True)).forced


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf])
def test_a_margin_that_means_nothing_is_refused(margin: float) -> None:
    with pytest.raises(SpecError, match="margin"):
        Rule("accuracy", margin=margin)
