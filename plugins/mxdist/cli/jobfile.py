"""A job file, JSON or YAML, with what the command line sets on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxdist.errors import Problem, SpecError
from mxdist.spec import EvaluationJob, TrainingJob, parse_job

_MAX_BYTES = 4 << 20


def read_job(
    path: Path, settings: Sequence[str] = (), *, dataset_from: Path | None = None
) -> TrainingJob | EvaluationJob:
    """Return the job in ``path``. The script or recipe that it names lies relative to the file itself.

    :param settings: ``path=value`` each, as in ``optimizer.learning_rate=0.1``; the value is YAML.
    :param dataset_from: a file that ``mxdist stage`` printed: the job's dataset, unless a setting says otherwise.
    :raises SpecError: with everything that is wrong.
    """
    document = _load(path, "is empty; a job needs a name, and a script or a model")
    if dataset_from is not None:
        _take_dataset(document, path, dataset_from)
    for setting in settings:
        _set(document, setting)
    _make_absolute(document, "script", "path", path.parent)
    if str(_part(document, "model").get("recipe", "")).endswith(".py"):
        _make_absolute(document, "model", "recipe", path.parent)
    if isinstance(document.get("kind"), (list, dict)):
        raise SpecError(str(path), [Problem("kind", "must be training or evaluation")])
    try:
        return parse_job(document)
    except SpecError as error:
        raise SpecError(str(path), error.problems) from None


def _load(path: Path, empty: str) -> dict[str, Any]:
    import yaml

    from mxdist.cli.strict_yaml import load

    try:
        document = load(_read(path), str(path))  # JSON is YAML
    except RecursionError:
        raise SpecError(str(path), [Problem("", "is nested too deeply")]) from None
    except OSError as error:
        raise SpecError(str(path), [Problem("", f"cannot be read: {error.strerror or error}")]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"is neither JSON nor YAML: {' '.join(str(error).split())}"
        if "'\\t'" in problem:
            problem += "; indent with spaces, not with tabs"
        raise SpecError(str(path), [Problem("", problem)]) from None
    if document is None:
        raise SpecError(str(path), [Problem("", empty)])
    if not isinstance(document, dict):
        raise SpecError(str(path), [Problem("", f"must be a mapping, not {type(document).__name__}")])
    return document


def _read(path: Path) -> str:
    """Return the text of a file, with or without a byte order mark; it may be a pipe as well."""
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise SpecError(str(path), [Problem("", f"is larger than {_MAX_BYTES >> 20} MiB; is it a job file?")])
    return data.decode("utf-8-sig")


def _take_dataset(document: dict[str, Any], path: Path, staged_in: Path) -> None:
    """Put manifest and version of a staged dataset into a job, and the storage too if the job names none."""
    staged = _load(staged_in, "is empty and so has no dataset; did `mxdist stage` fail?")
    found = staged if {"manifest_uri", "version"} <= staged.keys() else _part(staged, "dataset")
    if not {"manifest_uri", "version"} <= found.keys():
        raise SpecError(str(staged_in), [Problem("", "has no dataset: manifest_uri and version from `mxdist stage`")])
    dataset = document.get("dataset") or {}
    if not isinstance(dataset, dict):
        raise SpecError(str(path), [Problem("dataset", f"must be a mapping, not {type(dataset).__name__}")])
    document["dataset"] = {**dataset, **{name: found[name] for name in ("manifest_uri", "version")}}
    if "storage" in staged and isinstance(document.get("storage") or {}, dict):
        document["storage"] = {**_part(staged, "storage"), **_part(document, "storage")}


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
        document[name] = {**part, field: str((folder / _expanded(part[field])).absolute())}


def _expanded(path: str) -> str:
    try:
        return str(Path(path).expanduser())
    except RuntimeError:  # ~nobody
        return path
