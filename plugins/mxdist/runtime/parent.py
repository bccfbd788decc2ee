"""Processes of a job end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from mxdist.runtime import exit_codes

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies; the setting survives ``exec``."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # A parent that died before the call sends nothing any more.
    if os.getppid() != parent or not _is_ours(parent):
        os._exit(exit_codes.RETRY)


def _is_ours(parent: int) -> bool:
    """Return whether the parent belongs to the same job: an orphan's new parent does not carry its token."""
    token = os.environ.get("MXDIST_TOKEN")
    if not token:
        return True
    try:
        return f"MXDIST_TOKEN={token}".encode() in Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
