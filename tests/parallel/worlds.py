"""Real ranks for tests: processes that meet at Horovod's rendezvous on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mxdist.data.stage import stage
from mxdist.launch import mpi
from mxdist.launch.plan import build_plan
from mxdist.launch.roles import PORT_NAME, RolePlan, worker_environment
from mxdist.runtime import mpi_world
from mxdist.runtime.crew import keep_port
from mxdist.runtime.rendezvous import Rendezvous
from mxdist.spec import EvaluationJob, TrainingJob, parse_job
from mxdist.store import Attempt, JobRun, open_store
from mxdist.tracking import models
from mxdist.tracking.journal import JournalReader, Record

BOUND_S = 300.0
"""For anything that a world does: a bound against hanging for ever, on a machine of any speed."""

PLUGINS = Path(__file__).parents[2] / "plugins"
MUTANT = Path(__file__).with_name("mutant.py")


def poll(condition: Callable[[], Any], *, what: str, bound_s: float = BOUND_S) -> Any:
    """Return the first true answer of ``condition``."""
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"waited {bound_s} s for {what}")


@dataclass
class World:
    """The ranks of one world, running or ended."""

    folder: Path
    rendezvous: Rendezvous | None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    helpers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: socket.socket | None = None

    def wait(self) -> list[int]:
        """Return the exit codes, once every rank has ended; those that outlive a failed one for long are killed."""
        try:
            poll(lambda: all(process.poll() is not None for process in self.processes), what="the ranks to end")
        finally:
            self.end()
        return [process.returncode for process in self.processes]

    def end(self) -> None:
        """Kill what is left."""
        for process in (*self.processes, *self.helpers):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self.rendezvous is not None:
            self.rendezvous.close()
            self.rendezvous = None
        if self.port is not None:
            self.port.close()

    def log(self, rank: int = 0) -> str:
        """Return what a rank printed."""
        return (self.folder / f"rank-{rank}.log").read_text(errors="replace")

    def logs(self) -> str:
        """Return what every rank printed, for the message of a failed check."""
        return "".join(f"-- rank {rank}\n{self.log(rank)}" for rank in range(len(self.processes)))

    def result(self, rank: int = 0) -> dict[str, Any]:
        """Return what a rank told the supervisor."""
        found: dict[str, Any] = json.loads((self.folder / f"rank-{rank}.result.json").read_text())
        return found

    def beat(self, rank: int = 0) -> dict[str, Any] | None:
        """Return a rank's last sign of life."""
        try:
            found: dict[str, Any] = json.loads((self.folder / f"rank-{rank}.beat.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found


def start(
    folder: Path,
    command: Sequence[str],
    size: int,
    environment: Mapping[str, str] | None = None,
    roles: Sequence[RolePlan] = (),
    starter: Sequence[str] = (),
) -> World:
    """Start ``size`` ranks of ``command``, each with its log in ``folder``.

    :param roles: parameter servers beside them.
    :param starter: what gives each its place in an MPI world.
    """
    folder.mkdir(parents=True, exist_ok=True)
    world = World(folder, Rendezvous(size) if size > 1 else None)
    shared = {"PYTHONPATH": str(PLUGINS), **(environment or {})}
    if roles:
        world.port = keep_port()
        shared[PORT_NAME] = str(world.port.getsockname()[1])
    for role in roles:
        world.helpers.append(_process(folder / f"{role.name}.log", role.command, {**shared, **role.environment}))
    places = _places(world, starter, size, shared) if starter else {}
    for rank in range(size):
        variables = {**_horovod(rank, size, world), **shared, **places.get(rank, {})}
        world.processes.append(_process(folder / f"rank-{rank}.log", command, variables))
    return world


def _places(
    world: World, starter: Sequence[str], size: int, environment: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    mpirun = _process(world.folder / "mpirun.log", starter, {**environment, "MXDIST_WORLD_DIR": str(world.folder)})
    world.helpers.append(mpirun)
    found = mpi_world.wait_for_places(world.folder, size, timeout_s=BOUND_S, ended=mpirun.poll)
    return {rank: mpi.environment({**_horovod(rank, size, world), **found[rank]}) for rank in range(size)}


def _process(log: Path, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _horovod(rank: int, size: int, world: World) -> dict[str, str]:
    port = str(world.rendezvous.port) if world.rendezvous else "0"
    return {
        "PYTHONPATH": str(PLUGINS),
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "127.0.0.1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class Jobs:
    """Training jobs of one dataset, on a run store in a folder."""

    root: Path
    dataset: dict[str, Any]
    mpirun: bool = False
    """Whether jobs over MPI get an mpirun; else their ranks find themselves alone."""

    def job(self, **fields: Any) -> TrainingJob:
        """Return a small training of an mlp in float64; ``fields`` change it."""
        document = {
            "name": "law",
            "model": {"name": "mlp", "params": {"hidden": 16}},
            "dataset": self.dataset,
            "epochs": 2,
            "batch_size": 8,
            "dtype": "float64",
            **fields,
        }
        job = parse_job(document)
        assert isinstance(job, TrainingJob)
        return job

    def claim(
        self, job: TrainingJob | EvaluationJob, key: str, *, after: int = 0, origin: int | None = None
    ) -> Attempt:
        """Claim an attempt, as a launcher does."""
        return JobRun(open_store(str(self.root / "runs")), key).claim(job, after=after, origin=origin)

    def folder(self, attempt: Attempt) -> Path:
        """Return the scratch folder of an attempt."""
        return self.root / "work" / attempt.claim.job_key / f"{attempt.number:010d}"

    def start(
        self,
        attempt: Attempt,
        *,
        world: int = 1,
        size: int | None = None,
        mutation: str = "",
        stop: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> World:
        """Start the ranks of one world of an attempt.

        :param size: ranks; default: what the job says.
        :param stop: ask them to stop before they have begun.
        :param mutation: a change to the loop, by its name in ``mutant.py``.
        """
        folder = self.folder(attempt) / f"world-{world}"
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(attempt.claim.job))
        if stop:
            (folder / "control.json").write_text('{"stop": true}')
        command = [sys.executable, str(MUTANT), mutation] if mutation else [sys.executable, "-m", "mxdist.runtime.rank"]
        variables = {
            "MXDIST_ATTEMPT_DIR": str(self.folder(attempt)),
            "MXDIST_WORLD_DIR": str(folder),
            "MXDIST_RUNS_URI": str(self.root / "runs"),
            "MXDIST_JOB_KEY": attempt.claim.job_key,
            "MXDIST_ATTEMPT": str(attempt.number),
            "MXDIST_INCARNATION": str(world),
        }
        job = attempt.claim.parsed()
        if job.parallelism.across_processes:
            variables["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        variables |= worker_environment(job)
        plan = build_plan(job, "key", runs_uri="", python=sys.executable, workdir="", cores=[0])
        ranks = size or job.parallelism.world_size
        starter = plan.starter if self.mpirun else ()
        return start(folder, command, ranks, {**variables, **(environment or {})}, plan.roles, starter)

    def train(self, key: str, *, mutation: str = "", **fields: Any) -> dict[str, np.ndarray]:
        """Train a job to its end and return the exported parameters."""
        return self.exported(self.trained(key, mutation=mutation, **fields))

    def trained(self, key: str, *, mutation: str = "", **fields: Any) -> Attempt:
        """Train a job to its end on its ranks and return the attempt."""
        attempt = self.claim(self.job(**fields), key)
        world = self.start(attempt, mutation=mutation)
        codes = world.wait()
        assert set(codes) == {0}, (codes, world.logs())
        return attempt

    def publish(self, key: str, folder: Path) -> str:
        """Publish an exported model under a name of its own and return its URI."""
        store = open_store(f"{self.root}/models/{key}")
        models.publish(folder, store)
        return f"{store.uri}/model"

    def exported(self, attempt: Attempt) -> dict[str, np.ndarray]:
        """Return the parameters that an attempt exported."""
        with np.load(self.folder(attempt) / "model" / "params.npz", allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}

    def journal(self, attempt: Attempt) -> list[Record]:
        """Return every record of an attempt's journal."""
        return JournalReader(self.folder(attempt) / "journal.jsonl").read()


def jobs(root: Path, splits: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Jobs:
    """Stage a dataset of arrays and return a maker of jobs for it."""
    source = root / "source"
    for split, (x, y) in splits.items():
        (source / split).mkdir(parents=True)
        np.save(source / split / "x.npy", x)
        np.save(source / split / "y.npy", y)
    staged = stage(str(source), str(root / "data"), "small")
    return Jobs(root, {"manifest_uri": staged["manifest_uri"], "version": staged["version"]})


def images(count: int, *, seed: int = 0, classes: int = 3, shape: tuple[int, ...] = (1, 12, 12)) -> tuple[Any, Any]:
    """Return random images, and labels that can be learnt from them."""
    generator = np.random.RandomState(seed)
    x = generator.randint(0, 256, (count, *shape)).astype(np.uint8)
    y = generator.randint(0, classes, count).astype(np.int64)
    for row, label in zip(x, y, strict=True):
        row.reshape(-1)[label * 10 : label * 10 + 10] = 255
    return x, y
