"""Whether a run's configuration names only parameters that the DAG has, and gives them values that its tasks can take.

Airflow takes any name: a typing mistake would train with the default instead, without a word. It checks values one by
one, not whether they fit together.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from mxdist.errors import Problem, SpecError
from mxdist.operators.early import task_problems

if TYPE_CHECKING:
    from airflow.sdk import Context

_FOREIGN = frozenset({"openlineage"})  # Airflow's own providers put this into the runs that they trigger


def check_conf(context: Context) -> None:
    """Refuse a configuration with a name that is no parameter; and, in a first task of the DAG, tasks that cannot run.

    A DAG without parameters takes any name.

    :raises SpecError: with every such name and the nearest that there is, and every wrong field of any task.
    """
    first = not getattr(context["task"], "upstream_task_ids", ())
    problems = [*_unknown_names(context), *(task_problems(context) if first else ())]
    if problems:
        raise SpecError(f"The configuration of this run of {context['dag'].dag_id}", problems)


def _unknown_names(context: Context) -> list[Problem]:
    dag, run = context.get("dag"), context.get("dag_run")
    conf = getattr(run, "conf", None)
    if dag is None or not isinstance(conf, dict):
        return []
    known = {name for owner in (dag, *dag.tasks) for name in owner.params}
    unknown = sorted(str(name) for name in conf if name not in known | _FOREIGN)
    return [Problem(name, _help(name, sorted(known))) for name in unknown] if known else []


def _help(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    rest = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}."
    return f"the DAG has no such parameter; {rest}"
