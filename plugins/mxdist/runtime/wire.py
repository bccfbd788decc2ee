"""The lines that a supervisor and the agents of other hosts send each other: JSON, one object a line.

What an agent says is ``{"mxdist": "<kind>", ...}``, so that a login shell's chatter cannot be taken for it. What it is
told is ``{"do": "<what>", "id": n, ...}``; everything with an id is answered by a ``reply`` with the same. Bytes travel
in base64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

KIND = "mxdist"
_BEGIN = b'{"mxdist":'


def say(kind: str, **fields: Any) -> bytes:
    """Return a line that an agent says."""
    return json.dumps({KIND: kind, **fields}, separators=(",", ":")).encode() + b"\n"


def order(what: str, **fields: Any) -> bytes:
    """Return a line that an agent is told."""
    return json.dumps({"do": what, **fields}, separators=(",", ":")).encode() + b"\n"


def hear(line: bytes) -> tuple[str, Mapping[str, Any]] | None:
    """Return what an agent says in a line, or None if the line is somebody else's."""
    if not line.startswith(_BEGIN):
        return None
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return str(said[KIND]), said


def pack(data: bytes) -> str:
    """Return bytes as they travel."""
    return base64.b64encode(data).decode()


def unpack(text: str) -> bytes:
    """Return bytes that have travelled."""
    return base64.b64decode(text)
