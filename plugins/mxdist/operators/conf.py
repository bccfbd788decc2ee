"""Whether a run's configuration names only parameters that the DAG has.

Airflow takes any name: a typing mistake would train with the default instead, without a word.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from mxdist.errors import Problem, SpecError

if TYPE_CHECKING:
    from airflow.sdk import Context

_FOREIGN = frozenset({"openlineage"})  # Airflow's own providers put this into the runs that they trigger


def check_conf(context: Context) -> None:
    """Refuse a configuration with a name that is no parameter. A DAG without parameters takes any name.

    :raises SpecError: with every such name, and the nearest that there is.
    """
    dag, run = context.get("dag"), context.get("dag_run")
    conf = getattr(run, "conf", None)
    if dag is None or not isinstance(conf, dict):
        return
    known = {name for owner in (dag, *dag.tasks) for name in owner.params}
    unknown = sorted(str(name) for name in conf if name not in known | _FOREIGN)
    if known and unknown:
        problems = [Problem(name, _help(name, sorted(known))) for name in unknown]
        raise SpecError(f"The configuration of this run of {dag.dag_id}", problems)


def _help(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    rest = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}."
    return f"the DAG has no such parameter; {rest}"
