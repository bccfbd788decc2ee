"""Score a new model and the champion on the same frozen examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mxdist.errors import Problem, SpecError
from mxdist.hooks.cluster import ClusterHook
from mxdist.hooks.mlflow import MlflowHook
from mxdist.operators.base import JobOperator
from mxdist.operators.train import dataset_fields, named_dataset
from mxdist.spec import EvaluationJob, misnamed

if TYPE_CHECKING:
    from airflow.sdk import Context

    from mxdist.store import Attempt, Result
    from mxdist.tracking.registry import Champion

_CHAMPION_TAG = "mxdist.champion_version"


class EvaluateModelOperator(JobOperator):
    """Score the challenger, and the champion if there is one, on a split that neither was trained on.

    :param challenger: what the training task returned.
    :param registered_model: whose champion is the rival; default: the training's own.
    :param dataset: the dataset, as StageDatasetOperator returns it; default: the challenger's own.
    :param labels: score on these labels only; default: those of the training.
    :param split: the split to score on.
    :param batch_size: examples at once; the scores do not depend on it.
    """

    template_fields: Sequence[str] = (
        *JobOperator.template_fields,
        "challenger",
        "registered_model",
        "dataset",
        "labels",
        "split",
        "batch_size",
    )

    def __init__(
        self,
        *,
        challenger: Any,
        registered_model: str | None = None,
        dataset: Any = None,
        labels: Any = None,
        split: str = "test",
        batch_size: int | str = 256,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.challenger = challenger
        self.registered_model = registered_model
        self.dataset = dataset
        self.labels = labels
        self.split = split
        self.batch_size = batch_size

    def build_job(self, context: Context) -> EvaluationJob:
        """Return the job: who is scored is decided here, once, and stands in the job."""
        fields, champion = self.job_fields(context), self._champion()
        trained = self._trained()
        models = {"challenger": trained.get("model_uri")}
        if champion is not None:
            models["champion"] = champion.model_uri or f"models:/{self._model_name()}/{champion.version}"
            fields["tracking"]["tags"][_CHAMPION_TAG] = champion.version
        dataset = trained.get("dataset") if self.dataset is None else self.dataset
        labels = trained.get("labels") if self.labels is None else self.labels
        return EvaluationJob.parse(
            {
                **fields,
                "models": models,
                "dataset": dataset_fields(dataset, labels),
                "split": self.split,
                "batch_size": self.batch_size,
            }
        )

    def hands_over_early(self) -> dict[str, Any]:
        """Return something of the form that the task will return."""
        return {"registered_model": self._model_name()}

    def hand_over(self, context: Context, attempt: Attempt, result: Result) -> dict[str, Any]:
        """Return the scores, and who had them on which data: what a promotion needs."""
        job, trained = attempt.claim.job, self._trained()
        champion = job["tracking"]["tags"].get(_CHAMPION_TAG)
        run_id, url, _ = self.recorded(attempt, result)
        return {
            "job_key": attempt.claim.job_key,
            "attempt": attempt.number,
            "state": result.state.value,
            "scores": {role: _numbers(found) for role, found in result.outputs["scores"].items()},
            "dataset_version": job["dataset"]["version"],
            "split": job["split"],
            "labels": job["dataset"]["labels"],
            "registered_model": self._model_name(),
            "challenger": _challenger(trained),
            "champion": None if champion is None else {"version": champion},
            "mlflow_run_id": run_id,
            "mlflow_run_url": self._shown(url),
            "duration_s": round(result.duration_s, 3),
        }

    def _champion(self) -> Champion | None:
        name = self._model_name()
        if not name or not self.mlflow_conn_id:
            return None
        from mxdist.tracking.registry import Registry

        return Registry(ClusterHook(self.mxdist_conn_id).runs(), MlflowHook(self.mlflow_conn_id).uri).champion(name)

    def _model_name(self) -> str | None:
        name = self.registered_model or self._trained().get("registered_model")
        if name and (problem := misnamed(str(name))):
            raise SpecError("The evaluation", [Problem("registered_model", problem)])
        return name

    def _trained(self) -> Mapping[str, Any]:
        return self.challenger if isinstance(self.challenger, Mapping) else {"model_uri": self.challenger}


def _challenger(trained: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("job_key", "attempt", "registered_version", "mlflow_run_id", "model_uri", "model_digest")
    return {**{key: trained.get(key) for key in keys}, "dataset": named_dataset(trained.get("dataset"))}


def _numbers(found: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: value for name, value in found.items() if value is None or isinstance(value, int | float)}
