"""A job file, JSON or YAML, with what the command line sets on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxdist.errors import Problem, SpecError
from mxdist.spec import EvaluationJob, TrainingJob, parse_job


def read_job(path: Path, settings: Sequence[str] = ()) -> TrainingJob | EvaluationJob:
    """Return the job in ``path``. The script or recipe that it names lies relative to the file itself.

    :param settings: ``path=value`` each, as in ``optimizer.learning_rate=0.1``; the value is YAML.
    :raises SpecError: with everything that is wrong.
    """
    document = _load(path)
    for setting in settings:
        _set(document, setting)
    _make_absolute(document, "script", "path", path.parent)
    if str(_part(document, "model").get("recipe", "")).endswith(".py"):
        _make_absolute(document, "model", "recipe", path.parent)
    try:
        return parse_job(document)
    except SpecError as error:
        raise SpecError(str(path), error.problems) from None


def _load(path: Path) -> dict[str, Any]:
    import yaml

    from mxdist.cli.strict_yaml import load

    try:
        document = load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except RecursionError:
        raise SpecError(str(path), [Problem("", "is nested too deeply")]) from None
    except OSError as error:
        raise SpecError(str(path), [Problem("", f"cannot be read: {error.strerror or error}")]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(str(path), [Problem("", f"is neither JSON nor YAML: {' '.join(str(error).split())}")]) from None
    if not isinstance(document, dict):
        raise SpecError(str(path), [Problem("", f"must be a mapping, not {type(document).__name__}")])
    return document


def _set(document: dict[str, Any], setting: str) -> None:
    import yaml

    where, equals, text = setting.partition("=")
    names = where.split(".")
    if not equals or not all(names):
        raise SpecError("--set", [Problem(setting, "must be path=value, as in optimizer.learning_rate=0.1")])
    for name in names[:-1]:
        inner = document.setdefault(name, {})
        if not isinstance(inner, dict):
            raise SpecError("--set", [Problem(where, f"{name} is not a mapping in the job file")])
        document = inner
    try:
        document[names[-1]] = yaml.safe_load(text)
    except RecursionError:
        raise SpecError("--set", [Problem(where, "the value is nested too deeply")]) from None
    except yaml.YAMLError as error:
        raise SpecError("--set", [Problem(where, f"the value is not YAML: {' '.join(str(error).split())}")]) from None


def _part(document: dict[str, Any], name: str) -> dict[str, Any]:
    part = document.get(name)
    return part if isinstance(part, dict) else {}


def _make_absolute(document: dict[str, Any], name: str, field: str, folder: Path) -> None:
    part = _part(document, name)
    if isinstance(part.get(field), str) and part[field]:
        document[name] = {**part, field: str((folder / part[field]).absolute())}
