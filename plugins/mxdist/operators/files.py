"""Files of the user's own, named relative to the DAG file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


def beside_dag(operator: BaseOperator, path: str) -> str:
    """Return ``path`` as it is when it is absolute, else relative to the folder of the DAG file."""
    dag, place = operator.get_dag(), Path(path).expanduser()
    return str(place if dag is None else Path(dag.fileloc).parent / place)
