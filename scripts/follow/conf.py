"""The parameters that ``MXDIST_DEMO_CONF`` gives the demo's DAG run, checked before anything is built or started.

Standard library only, and for any Python from 3.9: it runs before the environments exist.
"""

from __future__ import annotations

import ast
import difflib
import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DAG = "mnist_retrain"
VARIABLE = "MXDIST_DEMO_CONF"
_TYPES: dict[str, Any] = {"integer": int, "number": (int, float), "string": str, "boolean": bool}
_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", operator.ge),
    "exclusiveMinimum": ("more than", operator.gt),
    "maximum": ("at most", operator.le),
    "exclusiveMaximum": ("less than", operator.lt),
}


class WrongConf(Exception):
    """The variable holds something that the DAG cannot take; the text says what, in one sentence."""


def demo_conf(dag_file: Path) -> dict[str, Any]:
    """Return what the variable holds; nothing if it is not set.

    :raises WrongConf: it is no JSON object, names a parameter that the DAG does not have, or gives one a value that the
        DAG would refuse.
    """
    text = os.environ.get(VARIABLE) or "{}"
    try:
        conf = json.loads(text)
    except ValueError as error:
        raise WrongConf(f"{VARIABLE} is no JSON ({error}); write for example '{{\"seed\": 1}}'.") from None
    if not isinstance(conf, dict):
        raise WrongConf(f"{VARIABLE} must be a JSON object such as '{{\"seed\": 1}}', not {text!r}.")
    known = params_of(dag_file)
    unknown = [name for name in conf if known and name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        help_text = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}."
        raise WrongConf(f"{VARIABLE}: {dag_file.stem} has no parameter {unknown[0]!r}; {help_text}")
    problems = [f"{name} {problem}" for name in conf if name in known for problem in wrong(conf[name], known[name])]
    if problems:
        raise WrongConf(f"{VARIABLE}: {'; '.join(problems)}.")
    return conf


def wrong(value: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a JSON Schema of one simple value has against a value."""
    kind = schema.get("type")
    if kind in _TYPES and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"must be {kind}, not {json.dumps(value)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"must be one of {', '.join(map(str, schema['enum']))}, not {json.dumps(value)}"
    for key, (words, holds) in _BOUNDS.items():
        if key in schema and isinstance(value, (int, float)) and not holds(value, schema[key]):
            yield f"must be {words} {schema[key]}, not {json.dumps(value)}"


def params_of(dag_file: Path) -> dict[str, dict[str, Any]]:
    """Return the parameters in the file's ``PARAMS = {NAME: Param(default, text, **SCHEMA)}``, each with its schema.

    What cannot be told without running the file is left out.
    """
    try:
        statements = ast.parse(dag_file.read_text()).body
    except (OSError, SyntaxError):
        return {}
    constants: dict[str, Any] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign):
            names = [getattr(item, "id", "") for item in statement.targets]
        elif isinstance(statement, ast.AnnAssign):
            names = [getattr(statement.target, "id", "")]
        else:
            continue
        if names == ["PARAMS"] and isinstance(statement.value, ast.Dict):
            pairs = zip(statement.value.keys, statement.value.values)  # noqa: B905  # Python 3.9 has no strict
            return {str(key.value): _schema(call, constants) for key, call in pairs if isinstance(key, ast.Constant)}
        constants.update((name, _constant(statement.value, constants)) for name in names)
    return {}


def _schema(call: ast.expr, constants: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        value = _constant(keyword.value, constants)
        if keyword.arg is None:
            found.update(value or {})
        elif value is not None:
            found[keyword.arg] = value
    return found


def _constant(expression: Any, constants: Mapping[str, Any]) -> Any:
    """Return the value of a literal, or of the name of one; None for anything else."""
    if isinstance(expression, ast.Name):
        return constants.get(expression.id)
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError):
        return None
