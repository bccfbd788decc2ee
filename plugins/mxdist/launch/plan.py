"""From a job to exactly what will run. Pure: nothing is read, started or written here.

A plan holds no secret, only the names of those that will travel beside it, and no value that exists only once the
job runs (ports, tokens, attempt numbers), only their names. What is left is fixed by the job and the host, so a
plan can be shown before the start, compared in a golden file, and is what the supervisor then does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mxdist.environment import SECRET_NAMES, base_environment
from mxdist.launch import mpi
from mxdist.launch.diagram import draw
from mxdist.launch.hosts import LOOPBACK, HostPlan, place
from mxdist.launch.ranks import RankPlan, is_local, location_names, plan_ranks
from mxdist.launch.roles import PORT_NAME, RolePlan, plan_roles
from mxdist.spec import Controller, EvaluationJob, ScalingPolicy, TrainingJob

__all__ = [
    "LOOPBACK", "RUNTIME_NAMES", "SECRET_NAMES", "USER_FOLDER", "Plan", "RankPlan", "RolePlan", "base_environment",
    "build_plan", "localize", "supervisor_command", "user_file",
]  # fmt: skip

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


@dataclass(frozen=True)
class Plan:
    """Everything that will run for one job.

    :param attempt_dir: the scratch folder; ``<attempt>`` stands for the number that submission will give.
    :param scaling: what the replicas do to batch and rate; "" when they change nothing.
    :param diagram: who computes what, drawn.
    :param starter: what gives all ranks their places, over MPI; empty: no rank needs one.
    :param effective: batch and rate that a model is trained with, as they are recorded beside the job's own.
    :param roles: the processes beside the ranks: of parameter servers.
    :param hosts: those that have ranks, in order.
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
    hosts: tuple[HostPlan, ...] = ()
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
        wide = max(9, *(len(host.name) for host in self.hosts))
        rows = [f"rank  local  {'host':<{wide}}  cores  command"]
        for rank in self.ranks:
            place = f"{rank.rank:<4}  {rank.local_rank:<5}  {rank.host:<{wide}}"
            rows.append(f"{place}  {_cores(rank.cores):<5}  {' '.join(rank.command)}")
        return rows + self._beside(wide)

    def _beside(self, wide: int) -> list[str]:
        if not self.roles:
            return []
        rows = ["", f"role         {'host':<{wide}}  cores  command"]
        for role in self.roles:
            rows.append(f"{role.name:<11}  {role.host:<{wide}}  {_cores(role.cores):<5}  {' '.join(role.command)}")
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
    hosts: Sequence[str] | None = None,
) -> Plan:
    """Return what will run for ``job``.

    :param runs_uri: the run store of all jobs.
    :param python: the Python of the node environment.
    :param workdir: the folder that holds the scratch folders of all jobs.
    :param cores: the cores that the job may use on the host that submits; other hosts' are known there only.
    :param hosts: the names of the hosts, once a platform has chosen them.
    :raises SpecError: the ranks do not fit on the hosts.
    """
    places = place(job, hosts)
    attempt_dir, roles = f"{workdir}/{job_key}/<attempt>", plan_roles(job, python, [host.name for host in places])
    ranks = plan_ranks(job, job_key, places, runs_uri=runs_uri, python=python, cores=cores)
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
        starter=_starter(job, places, python),
        diagram=tuple(draw(job, [rank.host for rank in ranks])),
        roles=roles,
        hosts=places,
        runtime_names=tuple(sorted([*RUNTIME_NAMES, *([PORT_NAME] if roles else []), *location_names(job)])),
    )


def supervisor_command(python: str, attempt_dir: str) -> tuple[str, ...]:
    """Return the command that supervises the attempt of this scratch folder; the launcher adds the incarnation."""
    return (python, "-m", "mxdist.runtime.supervisor", attempt_dir)


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


def _starter(job: TrainingJob | EvaluationJob, hosts: Sequence[HostPlan], python: str) -> tuple[str, ...]:
    if job.parallelism.controller is not Controller.MPI or job.parallelism.world_size == 1:
        return ()
    slots = [(host.name, host.slots) for host in hosts]
    return mpi.command(slots, python, None if is_local(job) else ("<network>",))


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


def _cores(cores: tuple[int, ...] | None) -> str:
    return "share" if cores is None else ",".join(map(str, cores)) or "any"


def _shared(environments: Sequence[dict[str, str]]) -> dict[str, str]:
    first = environments[0]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in environments)}
