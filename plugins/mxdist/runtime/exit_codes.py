"""The exit codes by which a rank tells its supervisor what happened.

A script may end with one of them too, to say the same; any other code but 0 says only that it failed.
"""

from __future__ import annotations

DONE = 0
USER_ERROR = 81
"""The user's code or data is wrong: do not try again."""
STOPPED = 82
"""Stopped on request; a checkpoint was written."""
RETRY = 83
"""Something outside failed: trying again can help."""
NONFINITE = 84
"""A loss or a gradient was NaN or infinite: trying again gives the same."""
