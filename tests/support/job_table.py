"""The table of all fields in docs/job.md, made from the JSON Schema of a job file.

``python tests/support/job_table.py`` (with ``plugins`` on the path) writes it anew; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mxdist.spec import job_schema

PAGE = Path(__file__).parents[2] / "docs" / "job.md"
BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->"

_KINDS = {"TrainingJob": "training", "EvaluationJob": "evaluation"}
_TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
_BOUNDS = {"minimum": "≥ ", "exclusiveMinimum": "> ", "maximum": "≤ ", "exclusiveMaximum": "< "}

Row = tuple[str, str, str, str]
"""Field, type with bounds, default, meaning."""


def table() -> str:
    """Return the table in Markdown: one line a field, and which kinds of job have it."""
    definitions: dict[str, Any] = job_schema()["$defs"]  # type: ignore[assignment]
    kinds: dict[Row, list[str]] = {}
    for name, kind in _KINDS.items():
        for row in _rows(definitions[name], definitions):
            kinds.setdefault(row, []).append(kind)
    head = "| field | value | default | what it is | kind |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| `{name}` | {value} | {default} | {meaning} | {found[0] if len(found) == 1 else 'both'} |\n"
        for (name, value, default, meaning), found in kinds.items()
    )


def fields() -> list[str]:
    """Return every field by its path."""
    return [line.split("`")[1] for line in table().splitlines()[2:]]


def written() -> str:
    """Return the table that the page holds."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def _rows(schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str = "") -> Iterator[Row]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        path = f"{prefix}{name}"
        inner = _reference(field, definitions)
        if "properties" in inner:
            if path in {"model", "script", "dataset", "init"}:  # what may be left out as a whole
                yield path, "mapping", _default(name, field, required), _meaning(field, inner)
            yield from _rows(inner, definitions, f"{path}.")
        elif "properties" in (items := _reference(inner.get("items", {}), definitions)):
            yield path, "list of mappings", _default(name, field, required), _meaning(field, {})
            yield from _rows(items, definitions, f"{path}[].")
        else:
            yield path, _type(field, inner, definitions), _default(name, field, required), _meaning(field, {})


def _reference(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a field refers to, or itself; an optional field is what it is when it is given."""
    for option in (field, *field.get("anyOf", ())):
        if "$ref" in option:
            found: Mapping[str, Any] = definitions[option["$ref"].rpartition("/")[2]]
            return found
    return next((option for option in field.get("anyOf", ()) if option.get("type") != "null"), field)


def _type(field: Mapping[str, Any], inner: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in inner:
        return ", ".join(f"`{value}`" for value in inner["enum"])
    if inner.get("type") == "array":
        items = _reference(inner["items"], definitions)
        return f"list: {_type({}, items, definitions) if 'enum' in items else _TYPES[items['type']]}"
    if inner.get("type") == "object":
        return "mapping to " + ("text" if inner["additionalProperties"].get("type") == "string" else "single values")
    bounds = [f"{sign}{inner[key]}" for key, sign in _BOUNDS.items() if key in inner]
    return ", ".join([_TYPES[inner["type"]], *bounds])


def _default(name: str, field: Mapping[str, Any], required: object) -> str:
    if isinstance(required, list | tuple) and name in required:
        return "**required**"
    value = field.get("default")
    return "" if value in (None, [], {}, "") else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _meaning(field: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    text = str(field.get("description") or inner.get("description") or "").partition("\n")[0]
    return text.replace("|", "\\|")


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
