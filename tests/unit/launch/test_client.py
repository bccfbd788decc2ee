"""Keys, and what is decided without starting anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mxdist.errors import NotFound, SpecError
from mxdist.launch import Bundle, JobClient, Launcher, Life, Plan, build_plan, job_key_for_airflow, job_key_for_cli
from mxdist.launch.client import JOB_KEY
from mxdist.launch.local import default_workdir
from mxdist.launch.plan import base_environment
from mxdist.spec import EvaluationJob, JobState, TrainingJob, parse_job
from mxdist.store import Attempt, Cause, JobRun, Result, State, open_store


@dataclass
class Paper(Launcher):
    """A platform on paper: it notes what it is asked, and nothing runs.

    :param silent: the last supervisor dies before it can say that the job is lost.
    """

    silent: bool = False
    lives: dict[int, Life] = field(default_factory=dict)
    started: list[tuple[int, int]] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)

    def plan(self, job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str) -> Plan:
        return build_plan(job, job_key, runs_uri=runs_uri, python="python", workdir="/w", cores=(0,))

    def start(self, attempt: Attempt, bundle: Bundle, *, incarnation: int, secrets: Mapping[str, str]) -> bool:
        self.started.append((attempt.number, incarnation))
        lost = incarnation > attempt.claim.parsed().limits.max_restarts + 1
        self.lives[attempt.number] = Life.DEAD if lost else Life.ALIVE
        if lost and not self.silent:
            attempt.finish(Result(JobState.FAILED, ended_at=1.0, cause=Cause("lost", "nothing to publish")))
        return attempt.supervisors.append(incarnation, {"pid": 0})

    def life(self, attempt: Attempt) -> Life:
        return self.lives.get(attempt.number, Life.NEVER)

    def kill(self, attempt: Attempt, *, grace_s: float) -> None:
        self.killed.append(attempt.number)
        if self.lives.get(attempt.number) is Life.ALIVE:
            self.lives[attempt.number] = Life.DEAD


@pytest.fixture
def platform() -> Paper:
    return Paper()


@pytest.fixture
def client(tmp_path: Path, platform: Paper) -> JobClient:
    (tmp_path / "train.py").write_text("pass")
    return JobClient(open_store(str(tmp_path / "runs")), platform)


def job_in(tmp_path: Path, **changes: object) -> TrainingJob:
    job = parse_job({"name": "x", "script": {"path": str(tmp_path / "train.py")}, **changes})
    assert isinstance(job, TrainingJob)
    return job


def end(attempt: Attempt, platform: Paper, state: JobState) -> None:
    cause = None if state is JobState.SUCCEEDED else Cause("rank_exit", "it broke")
    attempt.finish(Result(state=state, ended_at=1.0, cause=cause))
    platform.lives[attempt.number] = Life.DEAD


def test_airflow_key_is_the_same_for_every_try_and_other_for_other_tasks() -> None:
    key = job_key_for_airflow("dag", "manual__2026-01-01T00:00:00+00:00", "train.Big_Task", -1)

    assert key == job_key_for_airflow("dag", "manual__2026-01-01T00:00:00+00:00", "train.Big_Task", -1)
    assert key.startswith("train-big-task-")
    assert JOB_KEY.match(key)
    others = {job_key_for_airflow(*parts) for parts in (("d", "r", "t", 0), ("d", "r", "t", 1), ("dr", "", "t", 0))}
    assert len(others) == 3


@pytest.mark.parametrize("task_id", ["a" * 200, "___", "Übung", "x"])
def test_every_task_id_gives_a_valid_key(task_id: str) -> None:
    assert JOB_KEY.match(job_key_for_airflow("dag", "run", task_id, 0))


def test_cli_key_changes_with_the_job(tmp_path: Path) -> None:
    assert job_key_for_cli(job_in(tmp_path)) == job_key_for_cli(job_in(tmp_path))
    assert job_key_for_cli(job_in(tmp_path)) != job_key_for_cli(job_in(tmp_path, seed=1))


@pytest.mark.parametrize("key", ["", "_jobs", "../x", "Upper", "a/b", "a" * 81, "a\n"])
def test_key_that_could_leave_its_prefix_is_refused(client: JobClient, tmp_path: Path, key: str) -> None:
    with pytest.raises(SpecError, match="The job key"):
        client.submit(job_in(tmp_path), key)


def test_cancel_of_a_preempted_job_gives_it_up_and_a_later_one_still_resumes(
    client: JobClient, platform: Paper, tmp_path: Path
) -> None:
    first = client.submit(job_in(tmp_path), "job").attempt
    end(first, platform, JobState.PREEMPTED)
    assert first.given_up() is None
    assert client.cancel(first, by="cli", reason="enough").state is JobState.PREEMPTED
    given_up = first.given_up()
    assert given_up is not None
    assert (given_up.by, given_up.reason) == ("cli", "enough")
    assert client.submit(job_in(tmp_path), "job").attempt.claim.origin == 1


@pytest.mark.parametrize(
    ("state", "origin"),
    [(JobState.FAILED, 1), (JobState.DEADLINE, 1), (JobState.PREEMPTED, 1), (JobState.CANCELLED, 2)],
)
def test_retry_goes_on_where_that_makes_sense(
    client: JobClient, platform: Paper, tmp_path: Path, state: JobState, origin: int
) -> None:
    first = client.submit(job_in(tmp_path), "job").attempt
    end(first, platform, state)
    second = client.submit(job_in(tmp_path), "job")

    assert (second.how, second.attempt.number, second.attempt.claim.origin) == ("started", 2, origin)
    assert 1 in platform.killed, "the older one's processes are made sure to be dead"


@pytest.mark.parametrize(("by", "origin"), [("deadline", 1), ("user", 2)])
def test_whoever_ends_a_job_at_its_deadline_the_next_goes_on(
    client: JobClient, platform: Paper, tmp_path: Path, by: str, origin: int
) -> None:
    first = client.submit(job_in(tmp_path), "job").attempt
    platform.lives[1] = Life.DEAD
    client.cancel(first, by=by, reason="its time was up", wait_s=0)

    assert client.submit(job_in(tmp_path), "job").attempt.claim.origin == origin


def test_changed_training_starts_from_scratch(client: JobClient, platform: Paper, tmp_path: Path) -> None:
    end(client.submit(job_in(tmp_path), "job").attempt, platform, JobState.FAILED)

    assert client.submit(job_in(tmp_path, seed=1), "job").attempt.claim.origin == 2
    end(client.attempt("job"), platform, JobState.FAILED)
    other_limits = job_in(tmp_path, seed=1, limits={"deadline_s": 5})
    assert client.submit(other_limits, "job").attempt.claim.origin == 2, "limits do not decide the weights"


@pytest.mark.parametrize(
    ("name", "origin"), [("train.py", 2), ("helper.py", 2), ("settings.yaml", 1), ("results.json", 1)]
)
def test_changed_code_starts_from_scratch_and_says_why(
    client: JobClient, platform: Paper, tmp_path: Path, name: str, origin: int
) -> None:
    end(client.submit(job_in(tmp_path), "job").attempt, platform, JobState.FAILED)
    (tmp_path / name).write_text("VALUE = 1")
    claim = client.submit(job_in(tmp_path), "job").attempt.claim

    assert claim.origin == origin
    assert ("the code was changed" in claim.note) == (origin == 2)


def test_another_mxdist_goes_on_with_the_same_code(
    client: JobClient,
    platform: Paper,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = client.submit(job_in(tmp_path), "job").attempt
    end(first, platform, JobState.FAILED)
    newer = tmp_path_factory.mktemp("newer")
    (newer / "__init__.py").write_text("# another version")
    monkeypatch.setattr("mxdist.launch.bundle.mxdist.__file__", str(newer / "__init__.py"))
    second = client.submit(job_in(tmp_path), "job").attempt

    assert first.claim.code_digest != second.claim.code_digest
    assert (second.claim.origin, second.claim.note) == (1, "")


def test_attempt_of_an_older_mxdist_that_noted_no_code_is_continued(
    client: JobClient, platform: Paper, tmp_path: Path
) -> None:
    claim = JobRun(client.runs, "job").claim(job_in(tmp_path), after=0, code_digest="0" * 64)
    end(claim, platform, JobState.FAILED)

    assert client.submit(job_in(tmp_path), "job").attempt.claim.origin == 1


def test_code_is_not_needed_to_find_a_job_that_runs(client: JobClient, tmp_path: Path) -> None:
    client.submit(job_in(tmp_path), "job")
    (tmp_path / "train.py").unlink()

    assert client.submit(job_in(tmp_path), "job").how == "reattached"
    with pytest.raises(SpecError, match=r"there is no file .*train\.py"):
        client.submit(job_in(tmp_path), "other")
    assert client.job_keys() == ["job"]


def test_claim_says_who_asked_and_with_which_code(client: JobClient, tmp_path: Path) -> None:
    claim = client.submit(job_in(tmp_path), "job", source={"dag_id": "d"}).attempt.claim

    assert claim.source == {"dag_id": "d"}
    assert len(claim.code_digest) == 64


def test_dead_supervisor_is_followed_by_the_next_within_the_budget(
    client: JobClient, platform: Paper, tmp_path: Path
) -> None:
    platform.silent = True
    attempt = client.submit(job_in(tmp_path, limits={"max_restarts": 1}), "job").attempt
    platform.lives[1] = Life.DEAD
    assert client.revive(attempt)
    platform.lives[1] = Life.DEAD
    assert client.revive(attempt), "the last one may only publish"
    platform.lives[1] = Life.DEAD
    assert not client.revive(attempt)

    result = attempt.result()
    assert platform.started == [(1, 1), (1, 2), (1, 3)]
    assert result is not None
    assert result.cause is not None
    assert (result.state, result.cause.kind) == (JobState.FAILED, "lost")


def test_retry_after_a_lost_job_goes_on_from_its_checkpoints(
    client: JobClient, platform: Paper, tmp_path: Path
) -> None:
    client.submit(job_in(tmp_path, limits={"max_restarts": 0}), "job")
    platform.lives[1] = Life.DEAD
    second = client.submit(job_in(tmp_path, limits={"max_restarts": 0}), "job")

    assert platform.started == [(1, 1), (1, 2), (2, 1)]
    assert (second.attempt.number, second.attempt.claim.origin) == (2, 1)


def test_jobs_are_listed(client: JobClient, tmp_path: Path) -> None:
    client.submit(job_in(tmp_path), "b")
    client.submit(job_in(tmp_path), "a")

    assert client.job_keys() == ["a", "b"]
    with pytest.raises(NotFound, match="there is no job 'c'"):
        client.attempt("c")


def test_environment_of_a_worker_does_not_reach_its_jobs() -> None:
    kept = base_environment({
        "PATH": "/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0", "AIRFLOW__CORE__FERNET_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x", "MLFLOW_TRACKING_PASSWORD": "x", "PYTHONPATH": "/control", "MXDIST_TOKEN": "x",
    })  # fmt: skip

    assert kept == {"PATH": "/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0"}


def test_scratch_folder_has_a_default() -> None:
    assert default_workdir({"MXDIST_WORKDIR": "/w"}) == Path("/w")
    assert default_workdir({"XDG_STATE_HOME": "/s"}) == Path("/s/mxdist/jobs")
    assert default_workdir({}) == Path(os.path.expanduser("~/.local/state/mxdist/jobs"))


@pytest.mark.parametrize(("exit_code", "whose"), [(-9, "the supervisor's"), (None, "ours")])
def test_supervisor_whose_ranks_are_gone_may_close_its_books(
    client: JobClient, platform: Paper, tmp_path: Path, exit_code: int | None, whose: str
) -> None:
    attempt = client.submit(job_in(tmp_path), "job").attempt
    attempt.write_state(State(state=JobState.STOPPING, ranks=[{"rank": 0, "exit_code": exit_code}]))
    looks = iter([Life.ALIVE] * 5)

    def life(_: Attempt) -> Life:
        """Alive for a few looks; then, unless it was killed, it has written its result."""
        alive = next(looks, Life.DEAD)
        if alive is Life.DEAD and not platform.killed:
            attempt.finish(Result(JobState.CANCELLED, ended_at=1.0, cause=Cause("cancel", "the supervisor's")))
        return alive

    platform.life = life  # type: ignore[method-assign]
    result = client.cancel(attempt, by="user", reason="ours", wait_s=0)

    assert result.cause is not None
    assert result.cause.message.endswith(whose)
