"""Score a new model and the champion on the same frozen examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mxdist.hooks.mlflow import MlflowHook
from mxdist.operators.base import JobOperator
from mxdist.operators.train import dataset_fields
from mxdist.spec import EvaluationJob

if TYPE_CHECKING:
    from airflow.sdk import Context

    from mxdist.store import Attempt, Result
