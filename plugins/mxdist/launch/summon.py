"""How mxdist is called onto a host that may have nothing of it yet: one constant command, and two frames.

The command is the same for every job and every host. What is to be done, and with what, is read from standard input.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mxdist

_FIRST = (  # one line without single quotes or exclamation marks: a csh at the other end breaks others up
    'import sys;f=open(0,"rb",0,closefd=False);n=int(f.readline() or 0);b=bytearray();'
    "[b.extend(f.read(n-len(b)) or sys.exit(75)) for _ in iter(lambda:len(b)<n,False)];"
    'exec(compile(bytes(b),"mxdist-bootstrap","exec"))'
)


def command(python: str) -> tuple[str, ...]:
    """Return the command that a host runs; ``-I``: nothing in the folder or the environment it starts in counts."""
    return (python, "-I", "-c", _FIRST)


def bootstrap() -> str:
    """Return the text of ``mxdist.runtime.bootstrap``."""
    return (Path(mxdist.__file__).parent / "runtime" / "bootstrap.py").read_text(encoding="utf-8")


def frames(document: Mapping[str, Any]) -> bytes:
    """Return what goes to the command's standard input; a conversation may follow."""
    parts = [bootstrap().encode(), json.dumps(document).encode()]
    return b"".join(b"%d\n" % len(part) + part for part in parts)
