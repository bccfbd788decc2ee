"""A share that goes wrong under a store in a folder: the system's own calls fail, as they do on NFS."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_CALLS = {
    "list": [(os, "scandir")],
    "look": [(os, "stat")],
    "open": [(io, "open"), (builtins, "open")],
    "unlink": [(os, "unlink")],
}


def sicken(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *calls: str, code: int = errno.ESTALE, after: int = 0
) -> None:
    """Make calls fail on everything in and under ``folder``.

    :param calls: of ``list``, ``look``, ``open`` and ``unlink``.
    :param after: how many succeed before.
    """
    for module, name in (place for call in calls for place in _CALLS[call]):
        monkeypatch.setattr(module, name, _failing(getattr(module, name), folder, code, after))


def _failing(real: Callable[..., Any], folder: Path, code: int, after: int) -> Callable[..., Any]:
    done = 0

    def call(path: Any = ".", *args: Any, **options: Any) -> Any:
        nonlocal done
        if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(folder):
            done += 1
            if done > after:
                raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **options)

    return call
