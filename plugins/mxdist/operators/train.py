"""Train a model, or run a training script, on a world of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mxdist.errors import LaunchError, Problem, SpecError
from mxdist.hooks.mlflow import MlflowHook
from mxdist.links.mlflow import MlflowModelLink
from mxdist.operators.base import UNUSABLE, JobOperator
from mxdist.operators.early import MODEL_URI
from mxdist.operators.failures import as_airflow
from mxdist.operators.files import beside_dag
from mxdist.operators.turn import WAIT, check_policy, take_turn
from mxdist.spec import NETWORKS, TrainingJob

if TYPE_CHECKING:
    from airflow.sdk import Context

    from mxdist.launch.client import JobClient
    from mxdist.store import Attempt, Result

_METRICS_KEPT = 30


class DistributedTrainOperator(JobOperator):
    """Train on several ranks; the task waits without a worker.

    Everything may be templated; text is cast once, in the job's own checks, which name every wrong field before
    anything starts.

    :param model: what to train: a network of mxdist (``lenet``, ``mlp``, ``cifar_cnn``), a recipe (``recipe.py``
        beside the DAG file, or ``package.module``), or fields of ``Model``.
    :param script: or: an existing script, beside the DAG file or by its full path; or fields of ``Script``.
    :param dataset: the dataset, as StageDatasetOperator returns it.
    :param labels: train on these labels only; they become classes 0, 1, ...
    :param epochs: passes over the training split.
    :param batch_size: the global batch, over all ranks.
    :param learning_rate: short for ``optimizer={"learning_rate": ...}``.
    :param optimizer: fields of ``Optimizer``.
    :param seed: of initial weights, data order and dropout.
    :param job: other fields of ``TrainingJob``: ``dtype``, ``shuffle``, ``checkpoints``, ``failures``.
    :param registered_model: register the model under this name in MLflow.
    :param turn_of: the registered model that this training is for; one DAG run at a time trains for it. Default:
        ``registered_model``. Earlier trainings of a chain, whose models are not registered, name that of the last.
    :param out_of_turn: while another DAG run has the turn: ``wait`` for it without a worker, ``skip`` the task with the
        reason, or ``train`` all the same.
    """

    template_fields: Sequence[str] = (
        *JobOperator.template_fields,
        "model",
        "script",
        "dataset",
        "labels",
        "epochs",
        "batch_size",
        "learning_rate",
        "optimizer",
        "seed",
        "job",
        "registered_model",
        "turn_of",
        "out_of_turn",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **JobOperator.template_fields_renderers,
        "dataset": "json",
        "optimizer": "json",
        "job": "json",
    }

    def __init__(
        self,
        *,
        model: str | Mapping[str, Any] | None = None,
        script: str | Mapping[str, Any] | None = None,
        dataset: Any = None,
        labels: Any = None,
        epochs: int | str = 1,
        batch_size: int | str = 64,
        learning_rate: float | str | None = None,
        optimizer: Mapping[str, Any] | None = None,
        seed: int | str = 0,
        job: Mapping[str, Any] | None = None,
        registered_model: str | None = None,
        turn_of: str | None = None,
        out_of_turn: str = WAIT,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.script = script
        self.dataset = dataset
        self.labels = labels
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.seed = seed
        self.job = job
        self.registered_model = registered_model
        self.turn_of = turn_of
        self.out_of_turn = out_of_turn

    def build_job(self, context: Context) -> TrainingJob:
        """Return the job, cast and checked."""
        check_policy(self.out_of_turn)
        return TrainingJob.parse({**self.job_fields(context), **self.training_fields(), **(self.job or {})})

    def before_submission(self, context: Context, client: JobClient, key: str) -> None:
        """Take the turn to train for the registered model, or wait for it."""
        if model := self.turn_of or self.registered_model:
            take_turn(self, context, client, key, model=str(model), policy=self.out_of_turn)

    def execute_in_turn(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Begin again: nobody seems to be ahead any more."""
        if event["status"] == "failed":
            with as_airflow():
                raise LaunchError(f"Whose turn it is cannot be told: {event['message']}")
        return self.begin(context)

    def training_fields(self) -> dict[str, Any]:
        """Return what is trained, and how."""
        optimizer = dict(self.optimizer or {})
        if self.learning_rate is not None:
            optimizer["learning_rate"] = self.learning_rate
        fields: dict[str, Any] = {
            "optimizer": optimizer,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        if (model := self.model_fields()) is not None:
            fields["model"] = model
        if self.script is not None:
            fields["script"] = self._script_fields(self.script)
        dataset, labels = self.given_dataset()
        if dataset is not None:
            fields["dataset"] = dataset_fields(dataset, labels)
        return fields

    def given_dataset(self) -> tuple[Any, Any]:
        """Return the dataset, as StageDatasetOperator returned it, and the labels to keep."""
        return self.dataset, self.labels

    def model_fields(self) -> Mapping[str, Any] | None:
        """Return what is trained as fields of ``Model``."""
        if not isinstance(self.model, str):
            return self.model
        if self.model.endswith(".py"):
            return {"recipe": beside_dag(self, self.model)}
        return {"recipe": self.model} if "." in self.model and self.model not in NETWORKS else {"name": self.model}

    def tracking_fields(self, context: Context) -> dict[str, Any]:
        """Return where the run is recorded, and the name under which the model is registered."""
        return {**super().tracking_fields(context), "registered_model": self.registered_model}

    def hands_over_early(self) -> dict[str, Any]:
        """Return something of the form that the task will return, before anything is trained."""
        dataset, labels = self.given_dataset()
        return {"model_uri": MODEL_URI, "model": self.model_fields(), "dataset": dataset, "labels": labels}

    def hand_over(self, context: Context, attempt: Attempt, result: Result) -> dict[str, Any]:
        """Return the model, its final metrics and where all of it is recorded."""
        run_id, url, version = self.recorded(attempt, result)
        self._push_model_link(context, version)
        job = attempt.claim.job
        return {
            "job_key": attempt.claim.job_key,
            "attempt": attempt.number,
            "state": result.state.value,
            "model_uri": result.model_uri,
            "model_digest": result.model_digest,
            "model": job.get("model"),
            "metrics": dict(sorted(result.metrics.items())[:_METRICS_KEPT]),
            "mlflow_run_id": run_id,
            "mlflow_run_url": self._shown(url),
            "registered_model": self.registered_model,
            "registered_version": version,
            "dataset": named_dataset(self.given_dataset()[0]),
            "labels": (job.get("dataset") or {}).get("labels"),
            "duration_s": round(result.duration_s, 3),
            "samples_per_s": result.samples_per_s,
        }

    def push_links(self, context: Context, run_url: str | None) -> None:
        """Show the way to run and model."""
        super().push_links(context, run_url)
        self._push_model_link(context, None)

    def _push_model_link(self, context: Context, version: str | None) -> None:
        if self.registered_model and self.mlflow_conn_id:
            from mxdist.tracking.links import model_url

            try:
                url = model_url(MlflowHook(self.mlflow_conn_id).ui_url, self.registered_model, version)
            except UNUSABLE:
                return
            MlflowModelLink.push(context, url)

    def _script_fields(self, script: str | Mapping[str, Any]) -> dict[str, Any]:
        fields = {"path": script} if isinstance(script, str) else dict(script)
        return {**fields, "path": beside_dag(self, str(fields.get("path", "")))}


class FineTuneOperator(DistributedTrainOperator):
    """Train on from the model of an earlier task: transfer learning, fine-tuning.

    Model and dataset default to those of the earlier task.

    :param init_from: what the earlier task returned.
    :param head: ``keep``: same classes; ``replace``: a new output layer.
    :param freeze_backbone: train the head alone; the rest keeps its weights and statistics.
    :param freeze: regular expressions of parameter names to freeze as well.
    :param reuse_head: keep the head although the label map differs.
    """

    template_fields: Sequence[str] = (
        *DistributedTrainOperator.template_fields,
        "init_from",
        "head",
        "freeze_backbone",
        "freeze",
        "reuse_head",
    )

    def __init__(
        self,
        *,
        init_from: Any,
        head: str = "keep",
        freeze_backbone: bool | str = False,
        freeze: Sequence[str] = (),
        reuse_head: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.init_from = init_from
        self.head = head
        self.freeze_backbone = freeze_backbone
        self.freeze = freeze
        self.reuse_head = reuse_head

    def training_fields(self) -> dict[str, Any]:
        """Return what is trained, and where its weights begin."""
        if not self._upstream().get("model_uri"):
            told = "the earlier task returned no model: was it skipped, or marked as success before it had ended?"
            raise SpecError("The job", [Problem("init_from", told)])
        init = {
            "model_uri": self._upstream().get("model_uri"),
            "head": self.head,
            "freeze_backbone": self.freeze_backbone,
            "freeze": self.freeze,
            "reuse_head": self.reuse_head,
        }
        return {**super().training_fields(), "init": init}

    def given_dataset(self) -> tuple[Any, Any]:
        """Return the dataset and the labels to keep; by default those of the earlier task."""
        upstream = self._upstream()
        dataset = upstream.get("dataset") if self.dataset is None else self.dataset
        return dataset, upstream.get("labels") if self.labels is None else self.labels

    def model_fields(self) -> Mapping[str, Any] | None:
        """Return what is trained; by default what the earlier task trained."""
        return super().model_fields() if self.model is not None else self._upstream().get("model")

    def _upstream(self) -> Mapping[str, Any]:
        return self.init_from if isinstance(self.init_from, Mapping) else {"model_uri": self.init_from}


def dataset_fields(dataset: Any, labels: Any) -> dict[str, Any]:
    """Return fields of ``Dataset`` from what StageDatasetOperator returned."""
    if not isinstance(dataset, Mapping):
        problem = Problem("dataset", f"must be what StageDatasetOperator returned, not {type(dataset).__name__}")
        raise SpecError("The dataset", [problem])
    fields = {key: dataset[key] for key in ("manifest_uri", "version") if key in dataset}
    return fields if labels is None else {**fields, "labels": labels}


def named_dataset(dataset: Any) -> dict[str, Any] | None:
    """Return what names a dataset's version, without the counts of its staging."""
    return {key: dataset.get(key) for key in ("manifest_uri", "version", "as_of")} if dataset else None
