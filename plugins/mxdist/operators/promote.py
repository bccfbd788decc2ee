"""Make a better model the champion, or keep the one there is and say why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from mxdist.errors import NotFound, Problem, SpecError, TrackingError
from mxdist.hooks.cluster import ClusterHook
from mxdist.hooks.mlflow import MlflowHook
from mxdist.links.mlflow import MlflowModelLink
from mxdist.operators.failures import as_airflow
from mxdist.operators.values import number, yes
from mxdist.spec import misnamed
from mxdist.store import JobRun

if TYPE_CHECKING:
    from airflow.sdk import BaseOperatorLink, Context

    from mxdist.tracking.gate import Rule, Scores
    from mxdist.tracking.registry import Candidate, Promotion

KEPT = "kept champion"
PROMOTED = "promoted"


class PromoteModelOperator(BaseOperator):
    """Move the alias ``champion`` if the challenger is better; a refusal is a success too, with its numbers.

    Returns ``decision`` (``promoted`` or ``kept champion``), the reason, and the champion's version afterwards.

    :param evaluation: what EvaluateModelOperator returned.
    :param metric: the metric that decides.
    :param higher_is_better: whether more of it is better.
    :param margin: by how much the challenger must be better; 0: by anything at all.
    :param force: promote whatever the numbers say; it is recorded.
    :param registered_model: the model's name in MLflow; default: the evaluation's.
    :param mxdist_conn_id: the connection to the run store, which keeps the promotion records.
    :param mlflow_conn_id: the connection to MLflow.
    """

    template_fields: Sequence[str] = (
        "evaluation",
        "metric",
        "higher_is_better",
        "margin",
        "force",
        "registered_model",
        "mxdist_conn_id",
        "mlflow_conn_id",
    )
    operator_extra_links: Sequence[BaseOperatorLink] = (MlflowModelLink(),)
    ui_color = "#fbf4e8"

    def __init__(
        self,
        *,
        evaluation: Any,
        metric: str = "accuracy",
        higher_is_better: bool | str = True,
        margin: float | str = 0.0,
        force: bool | str = False,
        registered_model: str | None = None,
        mxdist_conn_id: str = ClusterHook.default_conn_name,
        mlflow_conn_id: str = MlflowHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.evaluation = evaluation
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.margin = margin
        self.force = force
        self.registered_model = registered_model
        self.mxdist_conn_id = mxdist_conn_id
        self.mlflow_conn_id = mlflow_conn_id

    def check_early(self, context: Context) -> None:
        """Check the rule.

        :raises SpecError: with what is wrong with it.
        """
        self._rule()

    def execute(self, context: Context) -> dict[str, Any]:
        """Decide, and change the registry accordingly; doing it twice changes nothing more."""
        from mxdist.tracking.registry import Registry

        with as_airflow():
            name, rule = self._name(), self._rule()
            mlflow, runs = MlflowHook(self.mlflow_conn_id), ClusterHook(self.mxdist_conn_id).runs()
            challenger = self._challenger()
            promotion = Registry(runs, mlflow.uri, login=mlflow.login()).promote(
                name, challenger, self._champion(), rule, by=_who(context)
            )
        decision = PROMOTED if promotion.promoted else KEPT
        self.log.info("%s: %s.", decision, promotion.reason)
        self._push_link(context, name, promotion)
        return {
            "decision": decision,
            "reason": promotion.reason,
            "model": name,
            "version": challenger.version,
            "champion": promotion.champion,
            "previous": promotion.previous,
            "numbers": dict(promotion.numbers),
            "forced": promotion.forced,
            "drift": promotion.drift,
        }

    def _name(self) -> str:
        """Return the model's name.

        :raises SpecError: nobody gave one that MLflow takes, so there is nothing to promote.
        """
        if not isinstance(self.evaluation, Mapping):
            problem = f"must be what EvaluateModelOperator returned, not {type(self.evaluation).__name__}"
            raise SpecError("The promotion", [Problem("evaluation", problem)])
        name = self.registered_model or self.evaluation.get("registered_model")
        if not name:
            problem = "is required: neither the training, nor the evaluation, nor this task names the model in MLflow"
            raise SpecError("The promotion", [Problem("registered_model", problem)])
        if problem := misnamed(str(name)):
            raise SpecError("The promotion", [Problem("registered_model", problem)])
        return str(name)

    def _rule(self) -> Rule:
        from mxdist.tracking.gate import Rule

        return Rule(
            metric=self.metric,
            higher_is_better=yes("higher_is_better", self.higher_is_better),
            margin=number("margin", self.margin),
            force=yes("force", self.force),
        )

    def _challenger(self) -> Candidate:
        from mxdist.tracking.registry import Candidate

        about = self.evaluation["challenger"]
        return Candidate(
            version=about["registered_version"] or self._register_now(about),
            scores=self._scores("challenger", about["dataset"] or {}),
            run_id=about["mlflow_run_id"],
            model_uri=about["model_uri"],
            model_digest=about["model_digest"],
        )

    def _champion(self) -> Candidate | None:
        from mxdist.tracking.registry import Candidate

        about = self.evaluation["champion"]
        return None if about is None else Candidate(about["version"], self._scores("champion", {}))

    def _scores(self, role: str, trained: Mapping[str, Any]) -> Scores:
        from mxdist.tracking.gate import Scores

        as_of, trained_on = trained.get("as_of"), trained.get("version") or ""
        return Scores(self.evaluation["scores"][role], self.evaluation["dataset_version"], as_of, trained_on)

    def _register_now(self, about: Mapping[str, Any]) -> str:
        """Return the version of a model that could not be registered while MLflow was away."""
        from mxdist.tracking.replay import replay

        mlflow, runs = MlflowHook(self.mlflow_conn_id), ClusterHook(self.mxdist_conn_id).runs()
        if not about["job_key"]:
            raise NotFound("the challenger was not registered, and no training of ours made it.")
        attempt = JobRun(runs, about["job_key"]).attempt(about["attempt"])
        outcome = replay(attempt, attempt.claim.parsed(), login=mlflow.login(), uri=mlflow.uri)
        if outcome.registered_version is None:
            raise TrackingError(
                f"the challenger is not registered in MLflow: {outcome.message or 'the job did not ask for it'}"
            )
        return outcome.registered_version

    def _push_link(self, context: Context, name: str, promotion: Promotion) -> None:
        from mxdist.tracking.links import model_url

        MlflowModelLink.push(context, model_url(MlflowHook(self.mlflow_conn_id).ui_url, name, promotion.champion))


def _who(context: Context) -> str:
    task = context["ti"]
    return f"airflow:{task.dag_id}/{task.run_id}/{task.task_id}"
