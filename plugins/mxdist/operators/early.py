"""What is wrong with the tasks of a DAG run, told by its first task, before anything is staged or started.

Whatever a task takes from another one is not known yet: a stand-in of the right form takes its place. A task whose
fields cannot be known before others have run, such as one that pulls an XCom in a template, is not judged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mxdist.errors import Problem, SpecError

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)

DATASET = {"manifest_uri": "s3://not/staged/yet.json", "version": "0" * 64}
"""Stands for what StageDatasetOperator will return."""

MODEL_URI = "s3://not/trained/yet"

_OF_THE_TASK = frozenset(
    {"ti", "task", "task_instance", "task_instance_key_str", "params", "inlets", "outlets"}
    | {"inlet_events", "outlet_events", "triggering_asset_events", "map_index_template", "expanded_ti_count"}
)
"""Names in a template that mean another thing, or nothing yet, in another task."""


def task_problems(context: Context) -> list[Problem]:
    """Return every wrong field of the tasks of this run's DAG; what several have in common is told once."""
    found: dict[Problem, list[str]] = {}
    for task in getattr(context.get("dag"), "tasks", ()):
        for problem in _problems_of(task, context):
            found.setdefault(problem, []).append(task.task_id)
    return [Problem(f"{problem.path} of {', '.join(tasks)}", problem.message) for problem, tasks in found.items()]


def _problems_of(task: Any, context: Context) -> Sequence[Problem]:
    if not hasattr(task, "check_early"):
        return ()
    try:
        _rendered(task, context).check_early(context)
    except SpecError as error:
        return error.problems
    except Exception as error:  # a template, a macro, a connection: of any kind, and the task itself will meet it again
        log.debug("Task %s cannot be judged yet: %r", task.task_id, error)
    return ()


def _rendered(task: Any, context: Context) -> Any:
    """Return a copy of the task with its fields as far as they are known.

    :raises Exception: of any kind: they are not.
    """
    from airflow.sdk import XComArg
    from jinja2 import StrictUndefined

    copy, known = task.prepare_for_execution(), _known(task, context)
    environment = copy.get_template_env()
    environment.undefined = StrictUndefined
    for name in copy.template_fields:  # one by one: Airflow's own function for all logs a failure as an error
        value = getattr(copy, name)
        if isinstance(value, XComArg):
            setattr(copy, name, _stand_in(value, context))
        elif any(True for _ in XComArg.iter_xcom_references(value)):
            raise LookupError(f"{name} holds what another task returns")
        else:
            setattr(copy, name, copy.render_template(value, known, environment, set()))
    return copy


def _stand_in(value: Any, context: Context) -> Mapping[str, Any]:
    """Return something of the form that an operator of ours will return."""
    operator, key = getattr(value, "operator", None), getattr(value, "key", None)
    if key != "return_value" or not hasattr(operator, "hands_over_early"):
        raise LookupError(f"{value!r} is not known yet")
    handed_over: Mapping[str, Any] = _rendered(operator, context).hands_over_early()
    return handed_over


def _known(task: Any, context: Context) -> Any:
    """Return what templates may name in any task of the run."""
    from airflow.sdk.definitions.param import process_params

    run: Any = context["dag_run"]
    params = process_params(context["dag"], task, getattr(run, "conf", None), suppress_exception=False)
    return {**{name: value for name, value in context.items() if name not in _OF_THE_TASK}, "params": params}
