"""What a task or a trigger may ask Airflow about other runs, through the Task SDK."""

from __future__ import annotations


def task_state(dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
    """Return the state of a task instance; None when it has none yet, or is not there.

    :raises Exception: of any kind: Airflow did not answer.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=map_index
    )
    name = task_id if map_index < 0 else f"{task_id}_{map_index}"
    state = states.get(run_id, {}).get(name)
    return None if state is None else _text(state)


def run_state(dag_id: str, run_id: str) -> str | None:
    """Return the state of a DAG run; None when there is no such run.

    :raises Exception: of any kind: Airflow did not answer.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    if not RuntimeTaskInstance.get_dr_count(dag_id=dag_id, run_ids=[run_id]):
        return None
    return _text(RuntimeTaskInstance.get_dagrun_state(dag_id=dag_id, run_id=run_id))


def _text(state: object) -> str:
    return str(getattr(state, "value", state))
