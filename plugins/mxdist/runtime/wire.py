"""The lines that a supervisor and the agents of other hosts send each other: JSON, one object a line.

What an agent says is ``{"mxdist": "<kind>", ...}``, so that a login shell's chatter cannot be taken for it. What it is
told is ``{"do": "<what>", "id": n, ...}``; everything with an id is answered by a ``reply`` with the same. Bytes travel
in base64.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from typing import Any

KIND = "mxdist"
_BEGIN = b'{"mxdist":'


_OWN_PAUSE_S = 2.0


class Silence:
    """How long nothing was heard, as far as this process was there to hear it.

    A process that was stopped, or got no processor for a while, must not take its own absence for another's.
    """

    def __init__(self) -> None:
        self._at, self._silent_s = time.monotonic(), 0.0

    def lasts(self, *, heard: bool) -> float:
        """Return the seconds of silence; to be asked every second or so.

        :param heard: something came since the last call.
        """
        now = time.monotonic()
        passed_s, self._at = now - self._at, now
        self._silent_s = 0.0 if heard else self._silent_s + min(passed_s, _OWN_PAUSE_S)
        return self._silent_s


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
