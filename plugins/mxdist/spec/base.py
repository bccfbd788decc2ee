"""What all specs share: frozen, unknown keys refused, every error at once, one digest."""

from __future__ import annotations

import difflib
import hashlib
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from mxdist.errors import Problem, SpecError

LABEL = r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$"
"""A name that every platform takes: lower case, digits and hyphens, at most 52 characters."""
STORED = "stored"
"""In the context of validators: whether the document is one that was accepted before."""

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 80, 80, 80


class Spec(BaseModel):
    """A frozen value that a user writes.

    Values that arrive as text (from Jinja, a trigger form or an environment) are cast here and nowhere else. A check
    over several fields is a validator of the last of them, so that it runs whatever else is wrong.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, document: Any) -> Any:
        """Read what a form, Jinja or YAML makes of a value.

        An optional field left blank, or ``None`` as Jinja renders it, is not given. ``true`` is no number, although
        Python takes it for 1: as the word that it is, it is refused where a number belongs.
        """
        if not isinstance(document, Mapping):
            return document
        kinds = {name: set(_leaves(field.annotation)) for name, field in cls.model_fields.items()}
        return {key: _value(value, kinds.get(key, set())) for key, value in document.items()}

    @classmethod
    def parse(cls, document: object, *, stored: bool = False) -> Self:
        """Return the spec that ``document`` (a mapping, as read from JSON or YAML) describes.

        :param stored: it was accepted when it was written: what is only advice to its writer is not judged anew.
        :raises SpecError: with every wrong field, each by its path.
        """
        try:
            return cls.model_validate(document, context={STORED: stored})
        except ValidationError as error:
            raise SpecError(cls.__name__, [_problem(cls, detail) for detail in error.errors()]) from None

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values, defaults included: what the run store keeps."""
        return self.model_dump(mode="json")

    def digest(self, *, exclude: Iterable[str] = ()) -> str:
        """Return the SHA-256 (hex) of the canonical JSON of this spec.

        Canonical JSON: keys sorted, no white space, UTF-8, numbers as Python's shortest ``repr``; it does not
        depend on the process, on the order of the keys as written, or on the version of Python.

        :param exclude: top-level fields that do not count.
        """
        return digest_of(self.model_dump(mode="json", exclude=set(exclude)))


def digest_of(document: object) -> str:
    """Return the SHA-256 (hex) of a JSON document in canonical form."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _value(value: Any, kinds: set[Any]) -> Any:
    """Return what a field of these kinds is given: see ``Spec._as_written``."""
    if NoneType in kinds and value in ("", "None"):
        return None
    if not kinds & {int, float} or bool in kinds:
        return value
    if isinstance(value, (list, tuple)):
        return [_value(one, kinds) for one in value]
    return str(value).lower() if isinstance(value, bool) else value


def _leaves(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    for part in inner:
        yield from _leaves(part)
    if not inner:
        yield annotation


def _problem(cls: type[BaseModel], detail: ErrorDetails) -> Problem:
    path = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = "unknown key" + _nearest(cls, detail["loc"])
    elif detail["type"] == "missing":
        message = "is required"
    elif detail["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]} (got {_short(detail['input'])})"
    return Problem(path, message)


def _short(value: object) -> str:
    text = _REPR.repr(value)  # bounded, also of a few lines of YAML that name each other many times
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest(cls: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    owner: type[BaseModel] | None = cls
    for part in loc[:-1]:
        owner = _model_of(owner, part)
    known = sorted(owner.model_fields) if owner else []
    close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}" if known else ""


def _model_of(owner: type[BaseModel] | None, field: int | str) -> type[BaseModel] | None:
    if owner is None or field not in owner.model_fields:
        return owner
    annotation = owner.model_fields[str(field)].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
