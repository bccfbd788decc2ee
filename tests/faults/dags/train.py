"""One small training on two ranks: what the fault tests disturb."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from mxdist.operators.train import DistributedTrainOperator

PARAMS = {
    "dataset": Param({}, type="object"),
    "deadline_s": Param(None, type=["number", "null"]),
    "stall_timeout_s": Param(3600.0, type="number"),
}

for dag_id, registered in (("train", None), ("doomed", None), ("abandoned", None), ("registered", "squares")):
    with DAG(dag_id, schedule=None, params=PARAMS, render_template_as_native_obj=True):
        DistributedTrainOperator(
            task_id="train",
            model={"name": "mlp", "params": {"hidden": 16}},
            dataset="{{ params.dataset }}",
            epochs=4,
            batch_size=16,
            world_size=2,
            learning_rate=0.05,
            # Ranks that a test holds must not be restarted: a cancel that was missed shall show as what it is.
            limits={
                "grace_s": 2,
                "deadline_s": "{{ params.deadline_s }}",
                "stall_timeout_s": "{{ params.stall_timeout_s }}",
            },
            cluster={"pin_cores": False, "threads_per_rank": 1},
            registered_model=registered,
            poll_s=0.5,
            retries=2,
            retry_delay=timedelta(seconds=1),
        )
