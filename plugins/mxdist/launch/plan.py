"""From a job to exactly what will run. Pure: nothing is read, started or written here.

A plan holds no secret, only the names of those that will travel beside it, and no value that exists only once the
job runs (ports, tokens, attempt numbers), only their names. What is left is fixed by the job and the host, so a
plan can be shown before the start, compared in a golden file, and is what the supervisor then does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxdist.launch import mpi
from mxdist.launch.diagram import draw
from mxdist.launch.roles import PORT_NAME, RolePlan, plan_roles, worker_environment
from mxdist.spec import Controller, EvaluationJob, Limits, ScalingPolicy, TrainingJob

SECRET_NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
"""The secrets that may travel to a job; no others do."""

RUNTIME_NAMES = (
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "MXDIST_ATTEMPT",
    "MXDIST_ATTEMPT_DIR",
    "MXDIST_INCARNATION",
    "MXDIST_TOKEN",
    "MXDIST_WORLD_DIR",
    "PYTHONPATH",
)
"""Variables of every rank whose values exist only once the job runs."""

USER_FOLDER = "user"
"""The folder of the user's code inside the bundle."""

LOOPBACK = "127.0.0.1"
_KEEP = {"HOME", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", "LANG", "LANGUAGE", "LD_LIBRARY_PATH"}
_KEEP |= {"AWS_CA_BUNDLE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION"}
_KEEP |= {"MXDIST_BARRIERS"}  # where tests hold processes: see barriers.py
_KEEP |= {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}
_KEEP |= {"REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "XDG_CACHE_HOME", "XDG_STATE_HOME"}
_KEEP_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "MXNET_", "HOROVOD_", "MLFLOW_HTTP_REQUEST_")
_GLOO_TIMEOUT_S = 30  # Horovod's own default: never wait less


@dataclass(frozen=True)
class RankPlan:
    """One rank: where it stands in the world, its cores, its command and its environment.

    :param cores: the cores it is bound to; empty: wherever the kernel likes.
    """

    rank: int
    local_rank: int
    host: str
    cores: tuple[int, ...]
    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """Everything that will run for one job.

    :param attempt_dir: the scratch folder; ``<attempt>`` stands for the number that submission will give.
    :param scaling: what the replicas do to batch and rate; "" when they change nothing.
    :param diagram: who computes what, drawn.
    :param starter: what starts all ranks at once, over MPI; empty: the supervisor starts each.
    :param effective: batch and rate that a model is trained with, as they are recorded beside the job's own.
    :param roles: the processes beside the ranks: of parameter servers.
    """

    name: str
    kind: str
    job_key: str
    digest: str
    runs_uri: str
    attempt_dir: str
    python: str
    work: str
    supervisor: tuple[str, ...]
    ranks: tuple[RankPlan, ...]
    limits: dict[str, Any]
    scaling: str = ""
    effective: dict[str, Any] = field(default_factory=dict)
    starter: tuple[str, ...] = ()
    diagram: tuple[str, ...] = ()
    roles: tuple[RolePlan, ...] = ()
    runtime_names: tuple[str, ...] = RUNTIME_NAMES
    secret_names: tuple[str, ...] = SECRET_NAMES

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def describe(self) -> str:
        """Return the plan as text for a reader."""
        parts = [self._head(), self.diagram, self._world(), self._environment(), self._bounds()]
        return "\n\n".join("\n".join(part) for part in parts) + "\n"

    def _head(self) -> list[str]:
        return [
            f"job         {self.name} ({self.kind}), {len(self.ranks)} rank{'s' if len(self.ranks) != 1 else ''}",
            f"job key     {self.job_key}",
            f"digest      {self.digest}",
            f"work        {self.work}",
            *([f"scaling     {self.scaling}"] if self.scaling else []),
            f"run store   {self.runs_uri}",
            f"scratch     {self.attempt_dir}",
            f"supervisor  {' '.join(self.supervisor)}",
            *([f"starter     {' '.join(self.starter)}"] if self.starter else []),
        ]

    def _world(self) -> list[str]:
        rows = ["rank  local  host       cores  command"]
        for rank in self.ranks:
            cores = ",".join(map(str, rank.cores)) or "any"
            rows.append(f"{rank.rank:<4}  {rank.local_rank:<5}  {rank.host:<9}  {cores:<5}  {' '.join(rank.command)}")
        return rows + self._beside()

    def _beside(self) -> list[str]:
        if not self.roles:
            return []
        rows = ["", "role         host       cores  command"]
        for role in self.roles:
            cores = ",".join(map(str, role.cores)) or "any"
            rows.append(f"{role.name:<11}  {role.host:<9}  {cores:<5}  {' '.join(role.command)}")
        return rows

    def _environment(self) -> list[str]:
        shared = _shared([rank.environment for rank in self.ranks])
        lines = ["environment of every rank"]
        lines += [f"  {name}={value}" for name, value in sorted(shared.items())]
        for rank in self.ranks:
            own = {name: value for name, value in rank.environment.items() if name not in shared}
            if own:
                values = " ".join(f"{name}={value}" for name, value in sorted(own.items()))
                lines.append(f"  rank {rank.rank}: {values}")
        lines += self._role_environment()
        lines.append("set at the start")
        lines += [f"  {name}" for name in self.runtime_names]
        lines.append("secrets, if given, by name only")
        lines += [f"  {name}" for name in self.secret_names]
        return lines

    def _role_environment(self) -> list[str]:
        if not self.roles:
            return []
        shared = _shared([role.environment for role in self.roles])
        own = " or ".join(sorted({role.role for role in self.roles}))
        values = {**shared, "DMLC_ROLE": own}
        return ["environment of every other role", *(f"  {name}={value}" for name, value in sorted(values.items()))]

    def _bounds(self) -> list[str]:
        return ["limits", *(f"  {name}: {'none' if value is None else value}" for name, value in self.limits.items())]


def build_plan(
    job: TrainingJob | EvaluationJob,
    job_key: str,
    *,
    runs_uri: str,
    python: str,
    workdir: str,
    cores: Sequence[int],
) -> Plan:
    """Return what will run for ``job``.

    :param runs_uri: the run store of all jobs.
    :param python: the Python of the node environment.
    :param workdir: the folder that holds the scratch folders of all jobs.
    :param cores: the cores that the job may use.
    """
    attempt_dir, roles = f"{workdir}/{job_key}/<attempt>", plan_roles(job, python)
    ranks = _ranks(job, job_key, runs_uri=runs_uri, python=python, cores=cores)
    return Plan(
        name=job.name,
        kind=job.kind,
        job_key=job_key,
        digest=job.digest(),
        runs_uri=runs_uri,
        attempt_dir=attempt_dir,
        python=python,
        work=_work(job),
        supervisor=supervisor_command(python, attempt_dir),
        ranks=ranks,
        limits=job.limits.to_document(),
        scaling=_scaling(job),
        effective=_effective(job),
        starter=_starter(job, ranks),
        diagram=tuple(draw(job, [rank.host for rank in ranks])),
        roles=roles,
        runtime_names=tuple(sorted([*RUNTIME_NAMES, *([PORT_NAME] if roles else [])])),
    )


def _ranks(
    job: TrainingJob | EvaluationJob, job_key: str, *, runs_uri: str, python: str, cores: Sequence[int]
) -> tuple[RankPlan, ...]:
    share = _share_cores(job, cores)
    return tuple(
        _rank(job, job_key, rank, runs_uri=runs_uri, python=python, cores=share[rank], usable=len(cores))
        for rank in range(job.parallelism.world_size)
    )


def supervisor_command(python: str, attempt_dir: str) -> tuple[str, ...]:
    """Return the command that supervises the attempt of this scratch folder; the launcher adds the incarnation."""
    return (python, "-m", "mxdist.runtime.supervisor", attempt_dir)


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a job inherits from whoever starts it: an allow-list, for a worker's environment holds secrets."""
    return {k: v for k, v in environment.items() if k in _KEEP or k.startswith(_KEEP_PREFIXES)}


def user_file(job: TrainingJob | EvaluationJob) -> tuple[str, Path | None]:
    """Return the field and the path of the user's own file: a script, or a recipe given as a file."""
    if isinstance(job, TrainingJob) and job.script is not None:
        return "script.path", Path(job.script.path)
    if isinstance(job, TrainingJob) and job.model is not None and (job.model.recipe or "").endswith(".py"):
        return "model.recipe", Path(str(job.model.recipe))
    return "", None


def localize(job: TrainingJob | EvaluationJob, code: Path) -> TrainingJob | EvaluationJob:
    """Return ``job`` with the script or recipe where the bundle in ``code`` has it."""
    field, main = user_file(job)
    if main is None or not isinstance(job, TrainingJob):
        return job
    inside = str(code / USER_FOLDER / main.name)
    if job.script is not None:
        return job.model_copy(update={"script": job.script.model_copy(update={"path": inside})})
    model = job.model.model_copy(update={"recipe": inside}) if job.model else None
    return job.model_copy(update={"model": model})


def _rank(
    job: TrainingJob | EvaluationJob,
    job_key: str,
    rank: int,
    *,
    runs_uri: str,
    python: str,
    cores: tuple[int, ...],
    usable: int,
) -> RankPlan:
    size = job.parallelism.world_size
    threads = job.cluster.threads_per_rank or max(1, len(cores) or usable // size)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        **_user_environment(job),
        **_horovod(job, rank),
        **worker_environment(job),
        "MXDIST_JOB_KEY": job_key,
        "MXDIST_RUNS_URI": runs_uri,
    }
    command = (python, "-m", "mxdist.runtime.rank")
    return RankPlan(rank=rank, local_rank=rank, host=LOOPBACK, cores=cores, command=command, environment=environment)


def _horovod(job: TrainingJob | EvaluationJob, rank: int) -> dict[str, str]:
    size, limits = job.parallelism.world_size, job.limits
    variables = {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": LOOPBACK,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(_GLOO_TIMEOUT_S, math.ceil(limits.start_timeout_s))),
        "HOROVOD_FUSION_THRESHOLD": str(job.parallelism.fusion_threshold_mb * 1024 * 1024),
        "HOROVOD_CYCLE_TIME": f"{job.parallelism.cycle_time_ms:g}",
        **({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if job.parallelism.across_processes else {}),
        **_stall_check(limits),
    }
    return mpi.environment(variables) if job.parallelism.controller is Controller.MPI else variables


def _stall_check(limits: Limits) -> dict[str, str]:
    """Horovod's own stall check. It counts whole seconds, and a shutdown below the warning is refused.

    Its warning, which names the missing rank, comes up to four warning times after a stall began (two until it drops
    the tensor from its cache, two more until it misses it). So a fifth of the limit, for the watchdog to know whom to
    blame when the limit is reached.
    """
    warn_s = max(1, math.floor(limits.stall_timeout_s / 5))
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(warn_s),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(warn_s + 1, math.ceil(limits.stall_timeout_s))),
    }


def _user_environment(job: TrainingJob | EvaluationJob) -> dict[str, str]:
    if isinstance(job, TrainingJob) and job.script is not None:
        return dict(job.script.env)
    return {}


def _share_cores(job: TrainingJob | EvaluationJob, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Give each rank cores of its own, neighbours together; none when there are too few, or only one rank."""
    size = job.parallelism.world_size
    each = len(cores) // size
    if not job.cluster.pin_cores or each == 0 or size == 1:
        return [()] * size
    ordered = sorted(cores)
    return [tuple(ordered[rank * each : (rank + 1) * each]) for rank in range(size)]


def _work(job: TrainingJob | EvaluationJob) -> str:
    if isinstance(job, EvaluationJob):
        return f"evaluate {', '.join(sorted(job.models))} on {job.dataset.manifest_uri} ({job.split})"
    if job.script is not None:
        return " ".join(["script", job.script.path, *job.script.args])
    model = job.model
    source = "" if model is None else f"model {model.name}" if model.name else f"recipe {model.recipe}"
    data = f" on {job.dataset.manifest_uri}" if job.dataset else ""
    return (
        f"{source}{data}, {job.epochs} epoch{'s' if job.epochs != 1 else ''}, global batch {job.effective().batch_size}"
    )


def _starter(job: TrainingJob | EvaluationJob, ranks: Sequence[RankPlan]) -> tuple[str, ...]:
    if job.parallelism.controller is not Controller.MPI or len(ranks) == 1:
        return ()
    names = [*ranks[0].environment, *RUNTIME_NAMES, *SECRET_NAMES]
    return mpi.command(LOOPBACK, len(ranks), set(names) - {"HOROVOD_GLOO_RENDEZVOUS_PORT"}, ranks[0].command)


def _effective(job: TrainingJob | EvaluationJob) -> dict[str, Any]:
    if isinstance(job, EvaluationJob) or job.model is None:
        return {}
    trained = job.effective()
    return {"effective_batch_size": trained.batch_size, "effective_learning_rate": trained.optimizer.learning_rate}


def _scaling(job: TrainingJob | EvaluationJob) -> str:
    if isinstance(job, EvaluationJob) or job.scaling.policy is ScalingPolicy.KEEP_GLOBAL_BATCH:
        return ""
    trained, base, copies = job.effective(), job.scaling.base_replicas, job.parallelism.copies
    schedule, rate = trained.optimizer.schedule, job.optimizer.learning_rate
    warm = f", reached from {rate:g} in {schedule.warmup_steps} steps" if schedule.warmup_from else ""
    return (
        f"scale_lr, {copies} replica{'s' if copies != 1 else ''} for {base}: global batch {trained.batch_size} for "
        f"{job.batch_size}, learning rate {trained.optimizer.learning_rate:g} for {rate:g}{warm}"
    )


def _shared(environments: Sequence[dict[str, str]]) -> dict[str, str]:
    first = environments[0]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in environments)}
