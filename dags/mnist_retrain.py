"""Retrain a digit classifier every week, and let it replace the champion only if it is better.

The 5,000 real MNIST images are staged to S3 as an immutable version. A LeNet learns the digits 0-4 on several
Horovod ranks; its features are transferred to the digits 5-9 (new head, the rest frozen) and then tuned as a whole at
a lower rate. Challenger and champion are scored on the same test split, and the registry's alias `champion` moves only
if the challenger wins by the margin. Otherwise the run still succeeds and says "kept champion".

Where things run and live is not written here: the connections `mxdist_default` (nodes, S3) and `mxdist_mlflow` say so.
"""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG, CronDataIntervalTimetable, Param

from mxdist.operators.evaluate import EvaluateModelOperator
from mxdist.operators.promote import PromoteModelOperator
from mxdist.operators.stage import StageDatasetOperator
from mxdist.operators.train import DistributedTrainOperator, FineTuneOperator
from mxdist.spec import AVAILABLE


def epochs(default: int, what: str) -> Param:
    return Param(default, type="integer", minimum=1, maximum=100, description=f"Passes over the data to {what}.")


def rate(default: float, what: str) -> Param:
    return Param(default, type="number", exclusiveMinimum=0, maximum=1, description=f"Learning rate to {what}.")


PARAMS = {
    "pretrain_epochs": epochs(4, "pretrain on digits 0-4"),
    "transfer_epochs": epochs(3, "train the new head on digits 5-9"),
    "finetune_epochs": epochs(4, "tune all layers"),
    "pretrain_rate": rate(0.05, "pretrain"),
    "transfer_rate": rate(0.05, "train the new head"),
    "finetune_rate": rate(0.01, "tune all layers"),
    "batch_size": Param(64, type="integer", minimum=1, maximum=4096, description="Examples a step, over all ranks."),
    "world_size": Param(2, type="integer", minimum=1, maximum=64, description="Ranks; must divide the batch size."),
    "strategy": Param("allreduce", enum=[s.value for s in AVAILABLE], description="How the gradients of ranks meet."),
    "margin": Param(0.0, type="number", minimum=0, maximum=1, description="Accuracy to gain to become champion."),
    "seed": Param(0, type="integer", minimum=0, maximum=2**31 - 1, description="Of weights and data order."),
}

with DAG(
    "mnist_retrain",
    doc_md=__doc__,
    # Each run covers the week that has just ended: the end of that week is the age of its data.
    schedule=CronDataIntervalTimetable("0 3 * * 1", timezone="UTC"),
    start_date=datetime(2026, 1, 5, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    params=PARAMS,
    default_args={"retries": 1},
    tags=["mxdist"],
):
    training = {
        "batch_size": "{{ params.batch_size }}",
        "world_size": "{{ params.world_size }}",
        "parallelism": {"strategy": "{{ params.strategy }}"},
        "seed": "{{ params.seed }}",
    }
    stage = StageDatasetOperator(task_id="stage", source="mnist5k", dataset_name="mnist5k")
    pretrain = DistributedTrainOperator(
        task_id="pretrain",
        model="lenet",
        dataset=stage.output,
        labels=[0, 1, 2, 3, 4],
        epochs="{{ params.pretrain_epochs }}",
        learning_rate="{{ params.pretrain_rate }}",
        **training,
    )
    transfer = FineTuneOperator(
        task_id="transfer",
        init_from=pretrain.output,
        labels=[5, 6, 7, 8, 9],
        head="replace",
        freeze_backbone=True,
        epochs="{{ params.transfer_epochs }}",
        learning_rate="{{ params.transfer_rate }}",
        **training,
    )
    finetune = FineTuneOperator(
        task_id="finetune",
        init_from=transfer.output,
        epochs="{{ params.finetune_epochs }}",
        learning_rate="{{ params.finetune_rate }}",
        registered_model="mnist_5_to_9",
        **training,
    )
    evaluate = EvaluateModelOperator(task_id="evaluate", challenger=finetune.output)
    PromoteModelOperator(task_id="promote", evaluation=evaluate.output, margin="{{ params.margin }}")
