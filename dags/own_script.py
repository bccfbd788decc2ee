"""Run a training script of your own, unchanged, on two Horovod ranks.

The script is `scripts/train_blobs.py`, beside this file: a plain MXNet and Horovod script that knows nothing of mxdist
or Airflow. Replace its path and arguments by yours. The logs of all ranks appear in the task's log; it can be cleared,
retried and marked like any other, and no rank outlives it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG, Param

from mxdist.operators.train import DistributedTrainOperator

with DAG(
    "own_script",
    doc_md=__doc__,
    schedule=None,  # started by hand
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    params={"epochs": Param(3, type="integer", minimum=1, maximum=100, description="Passes over the data.")},
    tags=["mxdist"],
):
    DistributedTrainOperator(
        task_id="train",
        script={"path": "scripts/train_blobs.py", "args": ["--epochs", "{{ params.epochs }}"]},
        world_size=2,
        limits={"deadline_s": 3600},
    )
