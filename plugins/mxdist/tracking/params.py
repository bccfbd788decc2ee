"""A job as MLflow parameters: one canonical text per value, so that the same value is never logged in two ways."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

LONGEST = 500
"""Longer values are replaced by their digest; MLflow itself cuts at 6000 without a word."""

_LEFT_OUT = ("storage", "tracking", "kind")


def canonical(value: object) -> str:
    """Return the one text of a value: ``true``, ``7`` (also for 7.0), ``0.1`` (also for 0.10), JSON for the rest."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def shortened(text: str) -> str:
    """Return the text, or its digest when it is too long to be read in a table."""
    if len(text) <= LONGEST:
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()} ({len(text)} characters, see config.json)"


def job_params(job: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the parameters of a job's document: dotted names, values that are not set left out.

    :param extra: more of them, such as the plan's; their names are kept as they are.
    """
    params: dict[str, str] = {}
    _flatten("", public(job), params)
    _flatten("", dict(extra or {}), params)
    return params


def public(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's document without what is no hyperparameter, and without the values of a script's environment."""
    document = {key: value for key, value in job.items() if key not in _LEFT_OUT}
    if document.get("script"):
        document["script"] = {**document["script"], "env": sorted(document["script"].get("env", ()))}
    return document


def metric_key(key: str) -> str:
    """Return a name that MLflow takes for a metric or a parameter."""
    return re.sub(r"/{2,}|[^a-zA-Z0-9_\-. :/]", "_", key)[:250].strip("/ .") or "_"


def _flatten(prefix: str, value: Any, params: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value):
            _flatten(f"{prefix}{key}.", value[key], params)
    elif value is not None and value not in ([], ()):
        params[metric_key(prefix.removesuffix("."))] = shortened(canonical(value))
