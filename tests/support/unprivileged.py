"""Run a server of the system as its own user when root starts it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def as_user(user: str, command: Sequence[str | Path]) -> list[str]:
    """Return the command, run by ``user`` if we are root; the process stays the same."""
    plain = [str(word) for word in command]
    if os.geteuid() != 0:
        return plain
    return ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs", *plain]


def give(user: str, *paths: Path) -> None:
    """Let ``user`` own these, if we are root."""
    if os.geteuid() == 0:
        for path in paths:
            shutil.chown(path, user, user)


@contextmanager
def open_folder(name: str) -> Iterator[Path]:
    """Yield a new folder that other users can pass through, as they cannot through pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix=f"mxdist-{name}-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
