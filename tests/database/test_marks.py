"""Marked, cleared, deleted, out of time: as on SQLite, where triggers get numbers of old ones, and here they do not."""

from __future__ import annotations

import pytest
from faults.test_marks import runs, test_cleared, test_deadline, test_deleted, test_marked

__all__ = ["runs", "test_cleared", "test_deadline", "test_deleted", "test_marked"]

pytestmark = pytest.mark.long
