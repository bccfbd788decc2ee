"""The last words of a run: a table of its stages, and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from follow.progress import Stage
from follow.view import metrics_text, state_word
from steps import duration_text

_HEAD = ("stage", "state", "duration", "samples/s", "result", "model", "alias")


def rows(stages: Sequence[Stage], results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return one row a stage, from what each handed over."""
    return [_row(stage, results.get(stage.task_id) or {}) for stage in stages]


def _row(stage: Stage, result: Mapping[str, Any]) -> tuple[str, ...]:
    rate = result.get("samples_per_s")
    seconds = max(stage.seconds, result.get("duration_s") or 0.0)  # it may have been over at the first look
    return (
        stage.task_id,
        state_word(stage.state),
        duration_text(seconds) if seconds else "",
        f"{rate:.0f}" if rate else "",
        _result(result),
        _model(result),
        f"champion = v{result['champion']}" if "decision" in result and result["champion"] else "",
    )


def _result(result: Mapping[str, Any]) -> str:
    if "decision" in result:
        return f"{result['decision']}: {result['reason']}"
    if "scores" in result:
        scored = result["scores"].items()
        return "  ".join(f"{role} {scores['accuracy']:.4f}" for role, scores in scored if "accuracy" in scores)
    if "uploaded_files" in result:
        return f"version {result['version'][:12]}, {result['uploaded_files']} of {result['files']} files sent"
    metrics = {name: value for name, value in (result.get("metrics") or {}).items() if name != "loss"}
    return metrics_text(metrics, limit=2)


def _model(result: Mapping[str, Any]) -> str:
    name = result.get("registered_model") or result.get("model")
    version = result.get("registered_version") or result.get("version")
    return f"{name} v{version}" if isinstance(name, str) and version and "scores" not in result else ""


def table(lines: Sequence[tuple[str, ...]]) -> str:
    """Return rows under a head, in columns; empty columns are left out."""
    used = [i for i in range(len(_HEAD)) if any(line[i] for line in lines)]
    grid = [[line[i] for i in used] for line in [_HEAD, *lines]]
    widths = [max(len(line[i]) for line in grid) for i in range(len(used))]
    text = [["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()] for line in grid]
    text.insert(1, ["  ".join("-" * width for width in widths)])
    return "\n".join(f"  {line[0]}" for line in text)
