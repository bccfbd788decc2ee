"""Operators that wait without a worker."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred


def deferred(operator: Any, context: Any) -> dict[str, Any]:
    """Run the operator until it defers; return its trigger's arguments."""
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    assert caught.value.method_name == "execute_complete"
    kwargs: dict[str, Any] = caught.value.trigger.serialize()[1]
    return kwargs
