"""What may be taken from a connection's extra field. Who edits connections is not who writes DAGs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mxdist.errors import Problem, SpecError

if TYPE_CHECKING:
    from airflow.sdk import Connection


def chosen_extras(connection: Connection, allowed: type[BaseModel]) -> dict[str, Any]:
    """Return the extras of ``connection``, without those that were left empty in the form.

    :param allowed: the only keys that are known; anything else is refused by name.
    :raises SpecError: an extra that ``allowed`` does not know.
    """
    filled = {key: value for key, value in connection.extra_dejson.items() if value not in (None, "")}
    known = sorted(allowed.model_fields)
    unknown = [key for key in filled if key not in allowed.model_fields]
    if unknown:
        message = f"is not taken; known are {', '.join(known)}"
        raise SpecError(f"Connection {connection.conn_id!r}", [Problem(f"extra.{key}", message) for key in unknown])
    return filled
