"""May the challenger become the champion? A pure decision, with its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal

from mxdist.errors import Problem, SpecError


@dataclass(frozen=True)
class Scores:
    """How a model did on a frozen evaluation set.

    :param metrics: None stands for a value that is not finite, where JSON has no other way to say so.
    :param dataset_version: the version of that set.
    :param as_of: the end of the data interval that the model was *trained* on, ISO 8601.
    :param trained_on: the dataset version that the model was trained on; the same version is of the same age.
    """

    metrics: Mapping[str, float | None] = field(default_factory=dict)
    dataset_version: str = ""
    as_of: str | None = None
    trained_on: str = ""


@dataclass(frozen=True)
class Rule:
    """What "better" means.

    :param metric: the metric that decides.
    :param margin: by how much the challenger must be better; 0: by anything at all.
    :param force: promote whatever the numbers say; it is recorded.
    """

    metric: str = "accuracy"
    higher_is_better: bool = True
    margin: float = 0.0
    force: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise SpecError("The promotion rule", [Problem("margin", f"must be 0 or more, not {self.margin:g}")])
        if not self.metric:
            raise SpecError("The promotion rule", [Problem("metric", "is required")])


@dataclass(frozen=True)
class Decision:
    """The answer, the reason in one sentence, and the numbers it rests on."""

    promote: bool
    reason: str
    numbers: Mapping[str, float | str | None] = field(default_factory=dict)
    forced: bool = False


def decide(challenger: Scores | None, champion: Scores | None, rule: Rule) -> Decision:
    """Return whether the challenger may replace the champion.

    :param champion: None when there is none yet.
    """
    numbers = _numbers(challenger, champion, rule)
    if challenger is None:
        return Decision(False, "there is no challenger", numbers)
    refusal = _refusal(challenger, champion, rule)
    if refusal and rule.force:
        return Decision(True, f"forced, although {refusal}", numbers, forced=True)
    if refusal:
        return Decision(False, refusal, numbers)
    mine = challenger.metrics[rule.metric]
    if champion is None:
        return Decision(True, f"first champion, with {rule.metric} {mine:.6g}", numbers)
    theirs = champion.metrics[rule.metric]
    return Decision(True, f"{rule.metric} {mine:.6g} beats the champion's {theirs:.6g}{_by(rule)}", numbers)


def _refusal(challenger: Scores, champion: Scores | None, rule: Rule) -> str:
    if problem := _unusable("challenger", challenger, rule.metric):
        return problem
    if champion is None:
        return ""
    if problem := _unusable("champion", champion, rule.metric):
        return problem
    if challenger.dataset_version != champion.dataset_version:
        mine, theirs = challenger.dataset_version[:12] or "none", champion.dataset_version[:12] or "none"
        return f"they were scored on different data (challenger {mine}, champion {theirs})"
    return _older(challenger, champion) or _not_better(challenger, champion, rule)


def _unusable(who: str, scores: Scores, metric: str) -> str:
    value = scores.metrics.get(metric)
    if metric in scores.metrics and value is None:
        return f"the {who}'s {metric} is not finite"
    if value is None:
        known = ", ".join(sorted(scores.metrics)) or "none"
        return f"the {who} has no {metric} (it has: {known})"
    return "" if math.isfinite(value) else f"the {who}'s {metric} is {value}"


def _older(challenger: Scores, champion: Scores) -> str:
    mine, theirs = challenger.as_of, champion.as_of
    if theirs is None or same_training_data(challenger.trained_on, champion.trained_on):
        return ""
    if mine is None:
        return f"nobody knows how old the challenger's data is (the champion's is as of {theirs})"
    try:
        older = _moment(mine) < _moment(theirs)
    except ValueError as error:
        return f"as_of is no date: {error}"
    return f"it was trained on older data (as of {mine}; the champion's is as of {theirs})" if older else ""


def same_training_data(mine: str, theirs: str) -> bool:
    """Return whether two models are known to be trained on the same version of a dataset."""
    return bool(mine) and mine == theirs


def latest(*dates: str | None) -> str | None:
    """Return the latest of these; what is no date does not count."""
    return max((date for date in dates if date and _is_date(date)), key=_moment, default=None)


def _is_date(text: str) -> bool:
    try:
        return bool(_moment(text))
    except ValueError:
        return False


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _not_better(challenger: Scores, champion: Scores, rule: Rule) -> str:
    mine, theirs = challenger.metrics[rule.metric], champion.metrics[rule.metric]
    if mine is None or theirs is None:
        return "a score is missing"
    gain = _exact(mine) - _exact(theirs) if rule.higher_is_better else _exact(theirs) - _exact(mine)
    if gain > 0 and gain >= _exact(rule.margin):
        return ""
    said = f"{rule.metric} {mine:.6g} does not beat the champion's {theirs:.6g}{_by(rule)}"
    return said if rule.higher_is_better else f"{said} (lower is better)"


def _exact(value: float) -> Decimal:
    return Decimal(repr(float(value)))  # 0.97 - 0.96 is 0.01, as whoever set the margin thinks


def _by(rule: Rule) -> str:
    return f" by {rule.margin:g}" if rule.margin else ""


def _numbers(challenger: Scores | None, champion: Scores | None, rule: Rule) -> dict[str, float | str | None]:
    numbers: dict[str, float | str | None] = {"metric": rule.metric, "margin": rule.margin}
    for who, scores in (("challenger", challenger), ("champion", champion)):
        value = scores.metrics.get(rule.metric) if scores else None
        numbers[who] = value if value is None or math.isfinite(value) else str(value)
        numbers[f"{who}_as_of"] = scores.as_of if scores else None
    return numbers
