"""The parameters that ``MXDIST_DEMO_CONF`` gives the demo's DAG run, checked before anything is built or started.

Standard library only, and for any Python from 3.9: it runs before the environments exist.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
from pathlib import Path
from typing import Any

DAG = "mnist_retrain"
VARIABLE = "MXDIST_DEMO_CONF"


class WrongConf(Exception):
    """The variable holds something that the DAG cannot take; the text says what, in one sentence."""


def demo_conf(dag_file: Path) -> dict[str, Any]:
    """Return what the variable holds; nothing if it is not set.

    :raises WrongConf: it is no JSON object, or names a parameter that the DAG does not have.
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
    return conf


def params_of(dag_file: Path) -> list[str]:
    """Return the names in the file's ``PARAMS = {...}``; none if it cannot be told without running the file."""
    try:
        statements = ast.parse(dag_file.read_text()).body
    except (OSError, SyntaxError):
        return []
    for statement in statements:
        named = isinstance(statement, ast.Assign) and [getattr(item, "id", "") for item in statement.targets]
        if named == ["PARAMS"] and isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return [str(key.value) for key in statement.value.keys if isinstance(key, ast.Constant)]
    return []
