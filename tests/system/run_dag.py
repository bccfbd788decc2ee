"""Run one DAG to its end in this process, as ``dag.test()`` does, and print what became of it as one line of JSON.

Started by the tests of this folder with a fresh AIRFLOW_HOME and connections in the environment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "MXDIST-RESULT "


def load(path: str, dag_id: str) -> Any:
    """Return the DAG of a file."""
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(dag_folder=path)
    if bag.import_errors:
        raise SystemExit(f"the DAG file does not import: {bag.import_errors}")
    return bag.dags[dag_id]


def main(path: str, dag_id: str, conf: str) -> None:
    """Run the DAG and print states and results of its tasks."""
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    run = load(path, dag_id).test(run_conf=json.loads(conf), use_executor=False)
    with create_session() as session:
        tasks = {task.task_id: str(task.state) for task in run.get_task_instances(session=session)}
        rows: Any = session.scalars(XComModel.get_many(run_id=run.run_id, dag_ids=dag_id)).all()
        xcoms: dict[str, dict[str, Any]] = {}
        for row in rows:
            xcoms.setdefault(row.task_id, {})[row.key] = XComModel.deserialize_value(row)
    print(
        MARK + json.dumps({"state": str(run.state), "run_id": run.run_id, "tasks": tasks, "xcoms": xcoms}), flush=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
