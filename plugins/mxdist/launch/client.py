"""Submit a job exactly once, re-attach to it, cancel it, revive it: the same for Airflow and the command line."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from mxdist.barriers import reach
from mxdist.errors import LaunchError, MxdistError, NotFound, Problem, SpecError, StoreError
from mxdist.launch.base import Launcher, Life
from mxdist.launch.bundle import Bundle, collect_later
from mxdist.launch.plan import user_file
from mxdist.spec import EvaluationJob, JobState, TrainingJob
from mxdist.store import Attempt, Cause, JobRun, Result, Store
from mxdist.store.run import INDEX, UNMOUNTED, job_keys, looks_unmounted

JOB_KEY = re.compile(r"^[a-z0-9][a-z0-9-]{0,79}\Z")
_ROUNDS = 10  # of deciding anew because somebody else was faster
_BOOKS_S = 90.0  # a supervisor without ranks: it drains the journal to MLflow for a minute, and closes the run
_LAST_WORD_S = 20.0  # a supervisor that may only publish, or say that nothing is left to be done
_LINGER_S = 5.0  # a supervisor that wrote its result needs this long, at most, to be gone


def job_key_for_airflow(dag_id: str, run_id: str, task_id: str, map_index: int) -> str:
    """Return the key of a task instance: the same for every try of it."""
    identity = "\0".join([dag_id, run_id, task_id, str(map_index)])
    return f"{_slug(task_id)[:40]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def job_key_for_cli(job: TrainingJob | EvaluationJob) -> str:
    """Return the key of a job file: the same as long as its content is."""
    return f"{job.name}-{job.digest()[:12]}"


@dataclass(frozen=True)
class Submission:
    """What came of a submission.

    :param how: ``started``: by this call; ``reattached``: it runs already; ``finished``: its result is there.
    """

    attempt: Attempt
    how: Literal["started", "reattached", "finished"]


class JobClient:
    """The jobs of one run store, on one platform.

    :param runs: the store of all jobs.
    """

    def __init__(self, runs: Store, launcher: Launcher) -> None:
        self.runs = runs
        self.launcher = launcher

    def submit(
        self,
        job: TrainingJob | EvaluationJob,
        job_key: str,
        *,
        source: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Submission:
        """Start the job, or find it: a retry reconnects, a clear starts again.

        :param source: who asks; kept with the claim.
        :param secrets: values for names of ``SECRET_NAMES``; others do not travel.
        :raises LaunchError: it could not be started.
        """
        if not JOB_KEY.match(job_key):
            problem = f"{job_key!r} must be lower case letters, digits and hyphens, at most 80"
            raise SpecError("The job key", [Problem("", problem)])
        self.launcher.plan(job, job_key, runs_uri=self.runs.uri)  # a wrong setting is told before anything is claimed
        bundle = collect_later(job)  # a job that runs has its code, whatever became of the files since
        run = JobRun(self.runs, job_key)
        for _ in range(_ROUNDS):
            latest = run.latest()
            reach(job_key, "submit-before-claim")
            if latest is None or _over(latest):
                self.launcher.check(job)
                attempt = self._claim(run, latest, job, bundle, source or {})
            elif latest.result() is not None:
                return Submission(latest, "finished")
            else:
                attempt = latest
            reach(job_key, "submit-claimed")
            how = self._ensure_started(attempt, bundle, secrets or {})
            reach(job_key, "submit-started")
            if how is not None:
                return Submission(attempt, how)
        raise LaunchError(f"{job_key} changed hands {_ROUNDS} times while it was submitted; try again later.")

    def cancel(
        self, attempt: Attempt, *, by: str, reason: str, marked_success: bool = False, wait_s: float = 30.0
    ) -> Result:
        """End the attempt and return how it ended. The wish is recorded first, so that it outlives this process.

        :param by: user, airflow, deadline, cli, reconciler.
        :param wait_s: how long its supervisor may take to end the ranks before everything is killed; once they are
            gone, it may take another while to tell MLflow and to write the result.
        :raises LaunchError: processes are left that cannot be ended from here, or the run store did not take the
            wish: what runs on this host is then ended all the same, and the error says what is left.
        """
        result = attempt.result()
        if result is None:
            try:
                attempt.request_cancel(by, reason, marked_success=marked_success)
            except StoreError as error:
                return self._end_unrecorded(attempt, error, grace_s=wait_s)
            result = self._await_result(attempt, wait_s)
        elif result.state is JobState.PREEMPTED:  # its run in MLflow waits for a next attempt
            attempt.give_up(by, reason, marked_success=marked_success)
        if result is None and _closes_its_books(attempt):
            result = self._await_result(attempt, _BOOKS_S)
        if result is None:
            self.launcher.kill(attempt, grace_s=0)
            result = attempt.finish(_cancelled(attempt))
        self._await_gone(attempt)
        self.launcher.kill(attempt, grace_s=1)
        return result

    def revive(self, attempt: Attempt, secrets: Mapping[str, str] | None = None) -> bool:
        """Start the next supervisor if the last one died without a result.

        A dead supervisor counts as a restart of the world. Nothing happens while one lives, or after the end. When
        no restart is left, one more supervisor starts all the same: it trains no more, but what the ranks have
        finished it publishes, and if they have not, it says that the job is lost.

        :return: False when that one died as well: the attempt is then recorded as FAILED, cause ``lost``.
        """
        life = self.launcher.life(attempt)
        if attempt.result() is not None:
            return True
        if life is Life.ALIVE:
            if waits_too_long(attempt):
                self.cancel(attempt, by="deadline", reason="it had not begun when its time was up", wait_s=0)
            return True
        if attempt.cancel_intent() is not None:
            self.cancel(attempt, by="reconciler", reason="its supervisor died before it could act", wait_s=0)
            return True
        number = attempt.supervisors.last()
        job = attempt.claim.parsed()
        limit = job.limits.max_restarts
        if number > limit + 1 and life is Life.DEAD:
            self.launcher.kill(attempt, grace_s=0)
            cause = Cause("lost", f"the supervisor died {number} times; no restart is left of {limit}", retryable=True)
            attempt.finish(_ended(attempt, JobState.FAILED, cause))
            return False
        self.launcher.start(attempt, collect_later(job), incarnation=number + 1, secrets=secrets or {})
        return True

    def forget(self, attempt: Attempt) -> None:
        """Let the platform remove what it keeps of an attempt whose result was taken; that it cannot is no error."""
        if attempt.result() is not None:
            with suppress(MxdistError):
                self.launcher.forget(attempt)

    def attempt(self, job_key: str, number: int | None = None) -> Attempt:
        """Return one attempt of a job, by default the one that counts.

        :raises NotFound: there is none; ``retryable`` where a share may be unmounted.
        """
        run = JobRun(self.runs, job_key)
        if number is not None:
            return run.attempt(number)
        latest = run.latest()
        if latest is None:
            away = looks_unmounted(self.runs)
            hint = UNMOUNTED if away else "`mxdist status` lists all jobs."
            raise NotFound(f"there is no job {job_key!r} in {self.runs.uri}.", hint=hint, retryable=away)
        return latest

    def job_keys(self) -> list[str]:
        """Return the keys of all jobs that were submitted to this store."""
        return job_keys(self.runs)

    def state(self, attempt: Attempt) -> JobState:
        """Return where the attempt stands."""
        result = attempt.result()
        return result.state if result else attempt.read_state().state

    def _claim(
        self,
        run: JobRun,
        latest: Attempt | None,
        job: TrainingJob | EvaluationJob,
        bundle: Bundle,
        source: Mapping[str, str],
    ) -> Attempt:
        digest, user_digest = bundle.digest, bundle.user_digest  # a script that is not there is told before anything
        self.runs.create_json(f"{INDEX}/{run.job_key}", {"job_key": run.job_key})
        origin, note = (None, "") if latest is None else _origin(latest, job, user_digest)
        if latest is not None and latest.result() is None:
            self.cancel(latest, by="user", reason="replaced by a new attempt")
        elif latest is not None:
            self.launcher.kill(latest, grace_s=0)
        return run.claim(
            job,
            after=latest.number if latest else 0,
            origin=origin,
            code_digest=digest,
            user_code_digest=user_digest,
            source=source,
            note=note,
        )

    def _ensure_started(
        self, attempt: Attempt, bundle: Bundle, secrets: Mapping[str, str]
    ) -> Literal["started", "reattached"] | None:
        """Make sure that the attempt has a supervisor; None if it has ended meanwhile."""
        life = self.launcher.life(attempt)
        if life is Life.ALIVE:
            return "reattached"
        if life is Life.NEVER:
            ours = self.launcher.start(attempt, bundle, incarnation=1, secrets=secrets)
            return "started" if ours else "reattached"
        if attempt.result() is None and self.revive(attempt, secrets) and _budget_spent(attempt):
            self._await_result(attempt, _LAST_WORD_S)
        return "reattached" if attempt.result() is None else None

    def _end_unrecorded(self, attempt: Attempt, refused: StoreError, *, grace_s: float) -> Result:
        """End by signal what runs here, for the run store takes no cancel intent: it is full, or away."""
        named = f"attempt {attempt.number} of {attempt.claim.job_key}"
        try:
            self.launcher.kill(attempt, grace_s=grace_s)
        except LaunchError as error:
            raise LaunchError(f"{named} still runs: {refused.message}, and {error}") from refused
        result = attempt.result()
        if result is None:
            raise LaunchError(
                f"{refused.message}: what ran of {named} on this host was ended by signal, but that is not recorded.",
                hint="Once the run store takes writes, cancel it again: else whoever follows the job starts it anew.",
            ) from refused
        return result

    def _await_result(self, attempt: Attempt, wait_s: float) -> Result | None:
        deadline = time.monotonic() + wait_s
        pause_s = 0.1
        while True:
            alive = self.launcher.life(attempt) is Life.ALIVE
            result = attempt.result()
            if result is not None or not alive or time.monotonic() > deadline:
                return result
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 1.0)

    def _await_gone(self, attempt: Attempt) -> None:
        deadline = time.monotonic() + _LINGER_S
        while self.launcher.life(attempt) is Life.ALIVE and time.monotonic() < deadline:
            time.sleep(0.1)


def log_lines(attempt: Attempt, *, after: int = 0) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    """Yield the chunks of the log after chunk ``after``: its number, and its lines with their numbers."""
    for number, chunk in attempt.logs.read(after):
        yield number, list(enumerate(chunk["lines"], start=chunk["first"]))


def _over(attempt: Attempt) -> bool:
    """Whether a new attempt must follow: after a cancel intent, a failure, or a result that was handed over."""
    if attempt.cancel_intent() is not None:
        return True
    result = attempt.result()
    return result is not None and (result.state is not JobState.SUCCEEDED or attempt.handed_over())


def _origin(latest: Attempt, job: TrainingJob | EvaluationJob, user_digest: str) -> tuple[int | None, str]:
    """Return the origin that a new attempt continues, or None and, where somebody may wonder, why it does not."""
    result, claim = latest.result(), latest.claim
    intent = latest.cancel_intent()
    if result is None or not result.state.resumable or (intent is not None and intent.by != "deadline"):
        return None, ""
    scratch = f"training begins from scratch, although attempt {latest.number} was not finished"
    try:
        before = claim.parsed()
    except MxdistError:  # its checkpoints are not ours to judge
        return None, f"{scratch}: it was written by another version of mxdist"
    if not isinstance(job, TrainingJob) or not isinstance(before, TrainingJob):
        return None, ""
    if job.training_digest() != before.training_digest():
        return None, f"{scratch}: what decides the weights was changed in the job"
    if claim.user_code_digest and claim.user_code_digest != user_digest:
        field, main = user_file(job)
        return None, f"{scratch}: the code was changed ({main or field}, or Python beside it)"
    return claim.origin, ""


def waits_too_long(attempt: Attempt) -> bool:
    """Whether the time of a job is up that still queues: the supervisor, who would see to it, has not begun."""
    deadline = attempt.claim.deadline_at
    return deadline is not None and time.time() > deadline and not attempt.supervisors.last()


def _budget_spent(attempt: Attempt) -> bool:
    """Whether the newest supervisor may start no world any more."""
    worlds = max(attempt.supervisors.last() - 1, attempt.read_state().world)
    return worlds > attempt.claim.parsed().limits.max_restarts


def _closes_its_books(attempt: Attempt) -> bool:
    """Whether nothing but the last words of a supervisor is missing: killed now, it would leave MLflow's run open."""
    seen = attempt.read_state()
    return seen.state is JobState.STOPPING and all(rank.get("exit_code") is not None for rank in seen.ranks)


def _cancelled(attempt: Attempt) -> Result:
    intent = attempt.cancel_intent()
    by, reason = (intent.by, intent.reason) if intent else ("user", "")
    if by == "deadline":
        return _ended(attempt, JobState.DEADLINE, Cause("deadline", reason, retryable=False))
    return _ended(attempt, JobState.CANCELLED, Cause("cancel", f"cancelled by {by}: {reason}", retryable=False))


def _ended(attempt: Attempt, state: JobState, cause: Cause) -> Result:
    """Return the result of an attempt whose supervisor cannot write one any more."""
    seen, now = attempt.read_state(), time.time()
    return Result(
        state=state,
        ended_at=now,
        cause=cause,
        steps=seen.step,
        metrics=seen.metrics,
        restarts=max(0, seen.world - 1),
        duration_s=now - attempt.claim.submitted_at,
        mlflow_run_id=seen.mlflow_run_id,
        mlflow_run_url=seen.mlflow_run_url,
        tracking_complete=attempt.claim.parsed().tracking.uri is None,
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "job"
