"""Retrain a digit classifier every week; let it replace the champion only if it is better.

The 5,000 real MNIST images are staged to S3 as an immutable version. A LeNet learns the digits 0-4 on several
Horovod ranks; its features are transferred to the digits 5-9 (new head, the rest frozen) and then tuned as a whole at
a lower rate. Challenger and champion are scored on the same test split, and the alias `champion` moves only if the
challenger wins by the margin. Otherwise the run succeeds all the same, and says "kept champion".

Where jobs run and files live is not written here: the connections `mxdist_default` and `mxdist_mlflow` say so.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, CronDataIntervalTimetable, Param

from mxdist.operators.evaluate import EvaluateModelOperator
from mxdist.operators.promote import PromoteModelOperator
from mxdist.operators.stage import StageDatasetOperator
from mxdist.operators.train import DistributedTrainOperator, FineTuneOperator

EPOCHS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 100}
RATE: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
STRATEGIES = ["allreduce", "parameter_server"]  # those that need no more than a number of ranks
PARAMS = {
    "pretrain_epochs": Param(4, "Passes over the digits 0-4.", **EPOCHS),
    "pretrain_rate": Param(0.002, "Learning rate on the digits 0-4.", **RATE),
    "transfer_epochs": Param(3, "Passes over the digits 5-9 with the new head alone.", **EPOCHS),
    "transfer_rate": Param(0.005, "Learning rate of the new head.", **RATE),
    "finetune_epochs": Param(5, "Passes over the digits 5-9 with all layers.", **EPOCHS),
    "finetune_rate": Param(0.001, "Learning rate of all layers.", **RATE),
    "batch_size": Param(64, "Examples a step, over all ranks.", type="integer", minimum=1, maximum=4096),
    "world_size": Param(2, "Ranks; must divide the batch size.", type="integer", minimum=1, maximum=64),
    "strategy": Param("allreduce", "How the gradients of the ranks meet.", enum=STRATEGIES),
    "margin": Param(0.0, "Accuracy that a new champion must gain.", type="number", minimum=0, maximum=1),
    "seed": Param(0, "Of first weights and data order.", type="integer", minimum=0, maximum=2**31 - 1),
}
MODEL = "mnist_5_to_9"
TRAINING: dict[str, Any] = {
    "turn_of": MODEL,  # one run at a time trains for it, from the first training on
    "batch_size": "{{ params.batch_size }}",
    "world_size": "{{ params.world_size }}",
    "parallelism": {"strategy": "{{ params.strategy }}"},
    "optimizer": {"name": "adam"},
    "seed": "{{ params.seed }}",
}

with DAG(
    "mnist_retrain",
    doc_md=__doc__,
    # Each run covers the week that has just ended; the end of that week is the age of its data.
    schedule=CronDataIntervalTimetable("0 3 * * 1", timezone="UTC"),
    start_date=datetime(2026, 1, 5, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    params=PARAMS,
    default_args={"retries": 3, "retry_delay": timedelta(seconds=10)},
    tags=["mxdist"],
):
    stage = StageDatasetOperator(task_id="stage", source="mnist5k", dataset_name="mnist5k")
    pretrain = DistributedTrainOperator(
        task_id="pretrain",
        model="lenet",
        dataset=stage.output,
        labels=[0, 1, 2, 3, 4],
        epochs="{{ params.pretrain_epochs }}",
        learning_rate="{{ params.pretrain_rate }}",
        **TRAINING,
    )
    transfer = FineTuneOperator(
        task_id="transfer",
        init_from=pretrain.output,
        labels=[5, 6, 7, 8, 9],
        head="replace",
        freeze_backbone=True,
        epochs="{{ params.transfer_epochs }}",
        learning_rate="{{ params.transfer_rate }}",
        **TRAINING,
    )
    finetune = FineTuneOperator(
        task_id="finetune",
        init_from=transfer.output,
        epochs="{{ params.finetune_epochs }}",
        learning_rate="{{ params.finetune_rate }}",
        registered_model=MODEL,
        **TRAINING,
    )
    evaluate = EvaluateModelOperator(task_id="evaluate", challenger=finetune.output)
    PromoteModelOperator(task_id="promote", evaluation=evaluate.output, margin="{{ params.margin }}")
