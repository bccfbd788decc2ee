"""A training script that cannot work, however often it is tried; with retries, as most tasks have them."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from mxdist.operators.train import DistributedTrainOperator

with DAG("typo", schedule=None):
    DistributedTrainOperator(
        task_id="train",
        script={"path": "scripts/typo.py"},
        world_size=2,
        cluster={"pin_cores": False, "threads_per_rank": 1},
        poll_s=0.5,
        retries=2,
        retry_delay=timedelta(seconds=1),
    )
