"""Single values that a template may have turned into text."""

from __future__ import annotations

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from mxdist.errors import Problem, SpecError

T = TypeVar("T")

_NUMBER, _YES = TypeAdapter(float), TypeAdapter(bool)


def number(name: str, value: object) -> float:
    """Return a number.

    :raises SpecError: it is none; the message names the field.
    """
    return _cast(_NUMBER, name, value)


def yes(name: str, value: object) -> bool:
    """Return a truth value: true, yes, on, 1, or the opposite.

    :raises SpecError: it is none; the message names the field.
    """
    return _cast(_YES, name, value)


def _cast(adapter: TypeAdapter[T], name: str, value: object) -> T:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise SpecError("The task", [Problem(name, f"{error.errors()[0]['msg']} (got {value!r})")]) from None
