"""What the code of a rank talks to: where it stands in the world, and whom it tells how it is doing.

mxdist's own loop uses it, and so may any script::

    from mxdist.runtime.worker import Worker

    worker = Worker.current()
    saved = worker.restore()
    for step in range(saved.step if saved else 0, steps):
        ...
        worker.beat(step)
        worker.log_metrics({"loss": loss}, step=step)
        if worker.agree(worker.should_stop()):
            worker.checkpoint({"weight": weight}, step=step)
            worker.stop()

Run by hand, without mxdist around it, a script finds itself a world of one in which nothing is recorded.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mxdist.errors import Problem, SpecError
from mxdist.runtime import exit_codes
from mxdist.spec import EvaluationJob, TrainingJob, parse_job
from mxdist.store import Attempt, JobRun, open_store
from mxdist.tracking.journal import JournalWriter

if TYPE_CHECKING:
    import mxnet as mx

    from mxdist.runtime.checkpoint import Saved

_BEAT_S = 0.5
_BUSY_BEAT_S = 1.0
_current: Worker | None = None


class Worker:
    """One rank of one world.

    :param rank: this rank, over all hosts.
    :param world_size: how many ranks there are.
    :param local_rank: this rank among those of its host.
    :param attempt_dir: scratch folder of the attempt, or None outside of a job.
    :param world_dir: scratch folder of this world.
    :param job_key: the job, or "" outside of one.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        attempt_dir: Path | None = None,
        world_dir: Path | None = None,
        runs_uri: str = "",
        job_key: str = "",
        attempt: int = 0,
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.attempt_dir, self.world_dir = attempt_dir, world_dir
        self._runs_uri, self.job_key, self._attempt = runs_uri, job_key, attempt
        self._beat_at = self._asked_at = float("-inf")
        self._stop = False
        self._step = 0

    @classmethod
    def current(cls) -> Worker:
        """Return the worker of this process."""
        global _current
        if _current is None:
            _current = cls.from_environment(os.environ)
        return _current

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Worker:
        """Return the worker that these variables describe."""
        get = environment.get
        attempt_dir, world_dir = get("MXDIST_ATTEMPT_DIR"), get("MXDIST_WORLD_DIR")
        return cls(
            rank=int(get("HOROVOD_RANK") or get("OMPI_COMM_WORLD_RANK", "0")),
            world_size=int(get("HOROVOD_SIZE") or get("OMPI_COMM_WORLD_SIZE", "1")),
            local_rank=int(get("HOROVOD_LOCAL_RANK") or get("OMPI_COMM_WORLD_LOCAL_RANK", "0")),
            attempt_dir=Path(attempt_dir) if attempt_dir else None,
            world_dir=Path(world_dir) if world_dir else None,
            runs_uri=get("MXDIST_RUNS_URI", ""),
            job_key=get("MXDIST_JOB_KEY", ""),
            attempt=int(get("MXDIST_ATTEMPT", "0")),
        )

    @cached_property
    def job(self) -> TrainingJob | EvaluationJob | None:
        """The job, or None outside of one."""
        if self.world_dir is None:
            return None
        return parse_job(json.loads((self.world_dir / "job.json").read_text(encoding="utf-8")), stored=True)

    @property
    def params(self) -> dict[str, Any]:
        """The hyperparameters of the job's model; empty for a script."""
        job = self.job
        return dict(job.model.params) if isinstance(job, TrainingJob) and job.model else {}

    @cached_property
    def devices(self) -> list[mx.Context]:
        """The devices of this rank: one, unless the job's layout gives each rank several.

        GPUs when the host has any, and then all of them must be there; else CPU contexts, of which MXNet takes any
        number. Horovod reduces the gradients of one device of a process only, and says nothing: a script that uses
        several must sum them itself first.

        :raises SpecError: the host has GPUs, but too few.
        """
        import mxnet as mx

        job, present = self.job, mx.context.num_gpus()
        count = 1 if job is None else job.parallelism.devices_per_rank
        numbers = range(self.local_rank * count, (self.local_rank + 1) * count)
        if present == 0 or (count == 1 and present <= self.local_rank):
            return [mx.cpu(number) for number in range(count)]
        missing = [f"gpu({number})" for number in numbers if number >= present]
        if missing:
            problem = f"rank {self.rank} needs {', '.join(missing)}, but its host has GPUs 0 to {present - 1} only"
            raise SpecError("The job", [Problem("parallelism.devices", problem)])
        return [mx.gpu(number) for number in numbers]

    @cached_property
    def attempt(self) -> Attempt | None:
        """The attempt in the run store, or None outside of a job."""
        if not self._runs_uri or self.job is None:
            return None
        storage = self.job.storage
        runs = open_store(self._runs_uri, endpoint_url=storage.endpoint_url, region=storage.region)
        return JobRun(runs, self.job_key).attempt(self._attempt)

    def log_metrics(self, metrics: Mapping[str, float], *, step: int, epoch: int | None = None) -> None:
        """Record metrics; rank 0 writes, the others do nothing."""
        if self.rank == 0 and self._journal is not None:
            self._journal.append(metrics, step=step, epoch=epoch)

    def beat(self, step: int) -> None:
        """Tell the supervisor that this rank is alive and how far it is; cheap enough for every step."""
        now = time.monotonic()
        if self.world_dir is None or now - self._beat_at < _BEAT_S:
            return
        self._beat_at = now
        self._write_beat(self.world_dir, step)

    def waits_for(self, rank: int) -> None:
        """Tell the supervisor that this rank cannot go on without another one, which lets it wait."""
        if self.world_dir is not None:
            self._write_beat(self.world_dir, self._step, waits_for=rank)

    def _write_beat(self, folder: Path, step: int, **more: int) -> None:
        self._step = step
        beat = {"rank": self.rank, "pid": os.getpid(), "step": step, "time": time.time(), **more}
        _replace(folder / f"rank-{self.rank}.beat.json", beat)

    @contextmanager
    def busy(self, step: int) -> Iterator[None]:
        """Beat while something runs that may take long and ends by itself: a download has time limits of its own."""
        done = threading.Event()

        def keep_beating() -> None:
            while not done.wait(_BUSY_BEAT_S):
                self.beat(step)

        self.beat(step)
        thread = threading.Thread(target=keep_beating, name="mxdist-busy", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def progress(
        self,
        *,
        epoch: int,
        epochs: int,
        step: int,
        steps: int,
        samples_per_s: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Tell how far the training is; rank 0 writes, the others do nothing.

        :param step: optimizer steps made, of ``steps`` in all.
        :param metrics: a few last values.
        """
        if self.rank != 0 or self.world_dir is None:
            return
        document = {
            "epoch": epoch, "epochs": epochs, "step": step, "steps": steps, "samples_per_s": samples_per_s,
            "metrics": {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)},
            "time": time.time(),
        }  # fmt: skip
        _replace(self.world_dir / "progress.json", document)

    def should_stop(self) -> bool:
        """Return whether the supervisor wants this rank to stop; ranks hear of it one by one: see ``agree``."""
        now = time.monotonic()
        if self._stop or self.world_dir is None or now - self._asked_at < _BEAT_S:
            return self._stop
        self._asked_at = now
        try:
            control = json.loads((self.world_dir / "control.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return False
        self._stop = bool(control.get("stop"))
        return self._stop

    def agree(self, flag: bool) -> bool:
        """Return whether any rank says so; every rank must ask, and all get the same answer."""
        if self.world_size == 1:
            return flag
        import horovod.mxnet as hvd
        import mxnet as mx

        asked = mx.nd.array([float(flag)], dtype="float64")
        return bool(hvd.allreduce(asked, op=hvd.Sum, name="mxdist.agree").asscalar())

    def verify(
        self,
        net: mx.gluon.Block,
        loss: Callable[[mx.nd.NDArray, mx.nd.NDArray], mx.nd.NDArray],
        batch: tuple[mx.nd.NDArray, mx.nd.NDArray],
        *,
        reduce: Callable[[], None] | None = None,
    ) -> float:
        """Make sure that the ranks' gradient is the one that a single process has; every rank must call it.

        Each rank computes the mean loss of its share, and the gradients are averaged over ranks; rank 0 computes that
        of all rows at once. Weights, statistics and gradients are left as they were. All rows must fit into one rank.

        :param net: with its first weights; on one device.
        :param loss: from output and label to one value for each example.
        :param batch: inputs and labels of this rank's share of one batch.
        :param reduce: the script's own way: leaves the average over ranks in the parameters' gradients.
        :return: the largest difference, as a share of the largest gradient; 0 in a world of one.
        :raises TrainingFailed: it is more than 1e-9 (float64) or 1e-4; naming the parameter; not retryable.
        """
        if self.world_size == 1:
            return 0.0
        from mxdist.runtime import script_check

        return script_check.check(net, loss, batch, reduce=reduce)

    def stop(self) -> NoReturn:
        """End this rank after its checkpoint, as asked: the training can go on from there."""
        raise SystemExit(exit_codes.STOPPED)

    def checkpoint(self, state: Mapping[str, Any], *, step: int) -> bool:
        """Save a script's state; every rank may call it, rank 0 writes. Return whether it was published.

        :param state: arrays (of mxnet or numpy) and JSON values, by name.
        """
        from mxdist.runtime import checkpoint

        return self.rank == 0 and self.attempt is not None and checkpoint.save_state(self.attempt, state, step=step)

    def restore(self) -> Saved | None:
        """Return the newest complete state that a script of this training saved, or None.

        All ranks read the same one as long as none of them saves before all have read.
        """
        from mxdist.runtime import checkpoint

        return None if self.attempt is None else checkpoint.Checkpoints(self.attempt).newest()

    def write_result(self, document: Mapping[str, Any]) -> None:
        """Tell the supervisor how this rank ended."""
        if self.world_dir is not None:
            _replace(self.world_dir / f"rank-{self.rank}.result.json", document)

    @cached_property
    def _journal(self) -> JournalWriter | None:
        return None if self.attempt_dir is None else JournalWriter(self.attempt_dir / "journal.jsonl")


def _replace(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document so that a reader sees the old one or the new one; a full disk must not end a training."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        print(f"mxdist: cannot write {path}: {error.strerror}", flush=True)
