"""Files of the user's own, named relative to the DAG file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


def beside_dag(operator: BaseOperator, path: str) -> str:
    """Return ``path`` as it is when it is absolute, else relative to the folder of the DAG file."""
    if Path(path).expanduser().is_absolute() or not operator.has_dag():
        return str(Path(path).expanduser())
    return str(Path(operator.dag.fileloc).parent / path)
