"""What only this user may look into, or get a copy of."""

from __future__ import annotations

import resource
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing; only this user may enter any of them.

    ``Path.mkdir(parents=True, mode=0o700)`` makes those above as the umask says.

    :raises OSError: as ``Path.mkdir``.
    """
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def dump_no_core() -> None:
    """Let neither this process nor those that it starts leave its memory, with keys in it, on a disk."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
