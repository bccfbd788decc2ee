"""What the operators that run a job have in common: submit, wait in the triggerer, hand over."""

from __future__ import annotations

import re
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowNotFoundException

from mxdist.barriers import reach
from mxdist.errors import LaunchError, MxdistError, SpecError, StoreError, TrackingError
from mxdist.hooks.cluster import ClusterHook
from mxdist.hooks.mlflow import MlflowHook
from mxdist.links.mlflow import MlflowModelLink, MlflowRunLink
from mxdist.operators.conf import check_conf
from mxdist.operators.failures import as_airflow, error_of
from mxdist.operators.life import LIFE, job_key_of, life_of, parent_of, source_of
from mxdist.store import JobRun
from mxdist.store.run import UNMOUNTED, looks_unmounted

if TYPE_CHECKING:
    from airflow.sdk import BaseOperatorLink, Context

    from mxdist.launch.client import JobClient
    from mxdist.spec import EvaluationJob, TrainingJob
    from mxdist.store import Attempt, Result

JOB_PLACE = "mxdist_job"
"""Where the task's job is: for the listeners, which know only what Airflow's database holds."""

JOB_SUBMITTED = "mxdist_submitted"
"""Under this name Airflow's state store keeps which job the task has submitted."""

UNUSABLE = (SpecError, AirflowNotFoundException)
"""What a hook raises whose connection was deleted meanwhile, or spoilt."""

_LACKS = "MLflow lacks some of this run (`mxdist reconcile` completes it): %s"
_KILL_WAIT_S = 4.0  # Airflow kills the process 5 s after it asked
_KILL_POLL_S = 0.2


@dataclass(frozen=True)
class _Current:
    """What a task is about to submit.

    :param life: tells a retry of the task from a clear.
    :param task: the task instance.
    """

    runs_uri: str
    job_key: str
    life: str
    task: Any


class JobOperator(BaseOperator):
    """Run one job on the nodes, and free the worker while it runs.

    The job is found again by its key, which is the same for every try of the task. A retry reconnects to a job that
    still runs and takes the result of one that is done; after a clear, the old job is ended and a new one begins.

    :param mxdist_conn_id: the connection that says where jobs run and files live.
    :param mlflow_conn_id: the connection to MLflow; None records nothing.
    :param experiment: the MLflow experiment; default: the DAG's id.
    :param world_size: number of ranks.
    :param parallelism: more about the ranks: fields of ``Parallelism``.
    :param limits: how long things may take: fields of ``Limits``; all in seconds.
    :param cluster: more about the nodes: fields of ``Cluster``; ``connection`` names the connection to them.
    :param tags: extra tags of the MLflow run.
    :param poll_s: seconds between two looks at the run store.
    :param check_conf: refuse a run whose configuration names a parameter that the DAG does not have; the first task
        of a run also refuses what no task of the DAG could take.
    """

    template_fields: Sequence[str] = (
        "mxdist_conn_id",
        "mlflow_conn_id",
        "experiment",
        "world_size",
        "parallelism",
        "limits",
        "cluster",
        "tags",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {
        "parallelism": "json",
        "limits": "json",
        "cluster": "json",
        "tags": "json",
    }
    operator_extra_links: Sequence[BaseOperatorLink] = (MlflowRunLink(), MlflowModelLink())
    ui_color = "#e8f0fb"

    def __init__(
        self,
        *,
        mxdist_conn_id: str = ClusterHook.default_conn_name,
        mlflow_conn_id: str | None = MlflowHook.default_conn_name,
        experiment: str | None = None,
        world_size: int | str = 1,
        parallelism: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        cluster: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        poll_s: float = 2.0,
        check_conf: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.mxdist_conn_id = mxdist_conn_id
        self.mlflow_conn_id = mlflow_conn_id
        self.experiment = experiment
        self.world_size = world_size
        self.parallelism = parallelism
        self.limits = limits
        self.cluster = cluster
        self.tags = tags
        self.poll_s = poll_s
        self.check_conf = check_conf
        self._current: _Current | None = None
        self._killing: threading.Thread | None = None
        self._killed = threading.Event()

    @abstractmethod
    def build_job(self, context: Context) -> TrainingJob | EvaluationJob:
        """Return the job, cast and checked.

        :raises SpecError: with every wrong field.
        """

    @abstractmethod
    def hand_over(self, context: Context, attempt: Attempt, result: Result) -> dict[str, Any]:
        """Return the small dict that goes to XCom."""

    def check_early(self, context: Context) -> None:
        """Check the job, on a copy of the task whose fields are known as far as they can be before it runs.

        :raises SpecError: with every wrong field.
        """
        self.mlflow_conn_id = None  # nobody needs to be asked
        self.build_job(context)

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit the job, or find it again; then wait for it without a worker."""
        return self.begin(context)

    def begin(self, context: Context) -> dict[str, Any]:
        """Do the work of ``execute``, which Airflow lets nobody call but itself."""
        with as_airflow():
            if self.check_conf:
                check_conf(context)
            job = self.build_job(context)
            hook = ClusterHook(self.mxdist_conn_id)
            client, key = hook.job_client(), job_key_of(context)
            self._announce(context, hook, key)
            self._check_mounted(context, client, key)
            self._end_earlier_life(client, key, life_of(context))
            self.before_submission(context, client, key)
            submission = client.submit(job, key, source=source_of(context), secrets=self._secrets(hook))
            context["task_state_store"].set(JOB_SUBMITTED, {"runs_uri": client.runs.uri, "job_key": key})
            self._stop_if_killed(client, submission.attempt)
            self.log.info("Job %s, attempt %d: %s.", key, submission.attempt.number, submission.how)
            if submission.how == "finished":
                return self._finish(context, client, submission.attempt)
            self._wait(context, submission.attempt, hook.settings.runs_uri)

    def before_submission(self, context: Context, client: JobClient, key: str) -> None:
        """Do what must be done before the job is submitted; it may also wait, or skip the task."""

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Go on where the trigger stopped watching."""
        with as_airflow():
            hook = ClusterHook(self.mxdist_conn_id)
            client = hook.job_client()
            attempt = client.attempt(job_key_of(context))
            if attempt.number != int(event["attempt"]):
                # From the trigger of an earlier try, whose number Airflow's database gave away again: not our news.
                self.log.info("Attempt %s is over and replaced; waiting for %d.", event["attempt"], attempt.number)
                self._wait(context, attempt, hook.settings.runs_uri)
            status = event["status"]
            if status == "failed":
                raise LaunchError(f"Job {attempt.claim.job_key} cannot be watched: {event['message']}")
            if status == "done" or (status == "lost" and not self._revive(client, hook, attempt)):
                return self._finish(context, client, attempt)
            self._wait(context, attempt, hook.settings.runs_uri, chunk=event["chunk"], line=event["line"])

    def on_kill(self) -> None:
        """End the job if somebody ended the task while it submitted. Airflow gives this a few seconds.

        A worker that is shut down ends its tasks in the same way, as does one that was silent for too long, or an
        ``execution_timeout``. Then the next try goes on with the job; without one, it ends with the DAG run.
        """
        if self._current is None or self._killing is not None:
            return
        # Not in this thread: the signal may have come while it held a lock, of the S3 client or of Airflow's.
        self._killing = threading.Thread(target=self._end_unless_wanted, args=(self._current,), daemon=True)
        self._killing.start()
        self._killing.join(_KILL_WAIT_S)

    def job_fields(self, context: Context) -> dict[str, Any]:
        """Return what every kind of job has, as a document to parse."""
        hook = ClusterHook(self.mxdist_conn_id)
        return {
            "name": job_name(self.task_id),
            "cluster": hook.cluster_fields(self.cluster or {}),
            "parallelism": {"world_size": self.world_size, **(self.parallelism or {})},
            "limits": dict(self.limits or {}),
            "storage": {"endpoint_url": hook.settings.endpoint_url, "region": hook.settings.region},
            "tracking": self.tracking_fields(context),
        }

    def tracking_fields(self, context: Context) -> dict[str, Any]:
        """Return where the run is recorded."""
        fields: dict[str, Any] = {
            "experiment": self.experiment or context["ti"].dag_id,
            "run_name": self.task_id,
            "parent": parent_of(context),
            "tags": dict(self.tags or {}),
        }
        if self.mlflow_conn_id:
            fields["uri"] = MlflowHook(self.mlflow_conn_id).uri
        return fields

    def push_links(self, context: Context, run_url: str | None) -> None:
        """Show the way to MLflow on the task's page."""
        MlflowRunLink.push(context, self._shown(run_url))

    def _secrets(self, hook: ClusterHook) -> dict[str, str]:
        return {**hook.secrets(), **(MlflowHook(self.mlflow_conn_id).secrets() if self.mlflow_conn_id else {})}

    def _announce(self, context: Context, hook: ClusterHook, key: str) -> None:
        """Say where the job will be before it is there, so that whoever cleans up finds it in any case."""
        place: dict[str, Any] = {
            "mxdist_conn_id": self.mxdist_conn_id,
            "mlflow_conn_id": self.mlflow_conn_id,
            "runs_uri": hook.settings.runs_uri,
            "job_key": key,
            "parent": parent_of(context),
        }
        self._current = _Current(hook.settings.runs_uri, key, life_of(context), context["ti"])
        context["ti"].xcom_push(key=JOB_PLACE, value=place)
        context["task_state_store"].set(JOB_PLACE, place)  # stays through retries and clears, when Airflow drops XComs

    def _check_mounted(self, context: Context, client: JobClient, key: str) -> None:
        """Make sure that a job which this task submitted before has not vanished with a share: it may be running.

        :raises StoreError: it has; ``retryable``.
        """
        submitted = context["task_state_store"].get(JOB_SUBMITTED)
        if submitted == {"runs_uri": client.runs.uri, "job_key": key} and looks_unmounted(client.runs):
            raise StoreError(f"{client.runs.uri} holds no job, not even {key}.", hint=UNMOUNTED)

    def _end_earlier_life(self, client: JobClient, key: str, life: str) -> None:
        """Make sure that the job of a task that was cleared is over; a retry has the same life and changes nothing."""
        latest = JobRun(client.runs, key).latest()
        if latest is None or latest.claim.source.get(LIFE) == life:
            return
        result = latest.result()
        if result is None:
            self.log.info("The task was cleared: ending attempt %d of job %s.", latest.number, key)
            client.cancel(latest, by="user", reason="the task was cleared")
        elif result.state.value == "SUCCEEDED":
            latest.hand_over()

    def _stop_if_killed(self, client: JobClient, attempt: Attempt) -> None:
        if self._killing is not None:
            self._killing.join(_KILL_WAIT_S)
        if self._killed.is_set():
            client.cancel(attempt, by="user", reason="the task was ended in Airflow", wait_s=_KILL_WAIT_S)

    def _end_unless_wanted(self, current: _Current) -> None:
        """Cancel what this task submitted, if it is over; the thread that submits may be about to claim it."""
        from mxdist.triggers.asking import ended_by_somebody

        if not ended_by_somebody(current.task):
            self.log.info("This try ends, but nobody has ended the task: its next try goes on with the job.")
            return
        self._killed.set()
        client = ClusterHook(self.mxdist_conn_id).job_client(current.runs_uri)
        give_up = time.monotonic() + _KILL_WAIT_S
        while time.monotonic() < give_up:
            attempt = JobRun(client.runs, current.job_key).latest()
            if attempt is not None and attempt.claim.source.get(LIFE) == current.life:
                if attempt.result() is None:
                    client.cancel(attempt, by="user", reason="the task was ended in Airflow", wait_s=_KILL_WAIT_S)
                return
            time.sleep(_KILL_POLL_S)

    def _revive(self, client: JobClient, hook: ClusterHook, attempt: Attempt) -> bool:
        self.log.warning("Job %s gives no sign of life; starting its supervisor again.", attempt.claim.job_key)
        try:
            secrets = self._secrets(hook)
        except UNUSABLE as error:
            self.log.warning("It cannot log in to MLflow: %s", error)
            secrets = hook.secrets()
        return client.revive(attempt, secrets)

    def _finish(self, context: Context, client: JobClient, attempt: Attempt) -> dict[str, Any]:
        result = attempt.result()
        if result is None:
            raise LaunchError(f"Job {attempt.claim.job_key}, attempt {attempt.number} has no result yet.")
        reach(attempt.claim.job_key, "hand-over")
        self.push_links(context, result.mlflow_run_url)
        if result.state.value != "SUCCEEDED":
            self._record_the_end(attempt, result)
            raise error_of(attempt, result)
        handed = self.hand_over(context, attempt, result)
        client.forget(attempt)
        return handed

    def _record_the_end(self, attempt: Attempt, result: Result) -> None:
        """Tell MLflow what it missed of a job that did not succeed; why the job did not is more important."""
        try:
            self.recorded(attempt, result)
        except (MxdistError, AirflowNotFoundException) as error:
            self.log.warning("MLflow was not told of the end: %s", error)

    def recorded(self, attempt: Attempt, result: Result) -> tuple[str | None, str | None, str | None]:
        """Return run, page and version; what MLflow missed while it was away is told to it now, if it is back."""
        known = (result.mlflow_run_id, result.mlflow_run_url, result.registered_version)
        if result.tracking_complete or not self.mlflow_conn_id:
            return known
        from mxdist.tracking.replay import replay

        mlflow = MlflowHook(self.mlflow_conn_id)
        try:
            login, uri = mlflow.login(), mlflow.uri
        except UNUSABLE as error:
            self.log.warning(_LACKS, error)
            return known
        outcome = replay(attempt, attempt.claim.parsed(), login=login, uri=uri)
        if not outcome.complete:
            self.log.warning(_LACKS, outcome.message)
        return outcome.run_id, outcome.run_url, outcome.registered_version

    def _wait(self, context: Context, attempt: Attempt, runs_uri: str, *, chunk: int = 0, line: int = 0) -> NoReturn:
        from mxdist.triggers.job import JobTrigger

        url = attempt.read_state().mlflow_run_url or self._make_run(attempt)
        self.push_links(context, url)
        trigger = JobTrigger(
            mxdist_conn_id=self.mxdist_conn_id,
            runs_uri=runs_uri,
            job_key=attempt.claim.job_key,
            attempt=attempt.number,
            poll_s=self.poll_s,
            await_run=bool(self.mlflow_conn_id) and url is None,
            chunk=chunk,
            line=line,
        )
        self.defer(trigger=trigger, method_name="execute_complete")

    def _make_run(self, attempt: Attempt) -> str | None:
        """Return the page of the MLflow run, made now if need be; None while MLflow is out of reach."""
        if not self.mlflow_conn_id:
            return None
        from mxdist.tracking.client import Client
        from mxdist.tracking.runs import find_or_create_run

        hook = MlflowHook(self.mlflow_conn_id)
        try:
            return find_or_create_run(Client(hook.uri, hook.login()), attempt, attempt.claim.parsed()).url
        except (TrackingError, StoreError, *UNUSABLE) as error:
            self.log.warning("No MLflow run yet, the training does not mind: %s", error)
            return None

    def _shown(self, url: str | None) -> str | None:
        """Return the address as a person's browser needs it, as far as the connection is there to tell."""
        if not url or not self.mlflow_conn_id:
            return url
        hook = MlflowHook(self.mlflow_conn_id)
        try:
            return f"{hook.ui_url}{url.removeprefix(hook.uri)}" if url.startswith(hook.uri) else url
        except UNUSABLE:
            return url


def job_name(task_id: str) -> str:
    """Return a task's id as the name of a job: lower case, digits, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", task_id.lower()).strip("-")[:52].strip("-") or "job"
