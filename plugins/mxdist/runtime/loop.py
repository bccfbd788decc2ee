"""The training loop: the same weights on any number of ranks as on one.

An epoch is a seeded permutation, a step is a slice of it, a rank has its share of the slice (``batches``). The mean
gradient of the global batch meets on every rank (``step``), and the ranks talk about everything else now and then
(``exchange``). At the end of every epoch they prove that they hold the same bits.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from mxdist.barriers import reach
from mxdist.errors import CheckpointError, NonFiniteError, StoreError
from mxdist.runtime import export, finetune, network, setup, verify
from mxdist.runtime.batches import Feed, order
from mxdist.runtime.checkpoint import Checkpoints, Saved
from mxdist.runtime.evaluate import score
from mxdist.runtime.exchange import Exchange, Report
from mxdist.runtime.laps import Laps, Stragglers
from mxdist.runtime.parallel import Group, join, layouts
from mxdist.runtime.parallel.servers import Store
from mxdist.runtime.position import Position
from mxdist.runtime.saver import Saver
from mxdist.runtime.step import Step
from mxdist.runtime.worker import Worker
from mxdist.spec import Init, TrainingJob

log = logging.getLogger(__name__)

_DRAIN_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How the loop ended.

    :param stopped: asked to stop; a checkpoint was published.
    :param result: what rank 0 tells the supervisor.
    """

    stopped: bool
    result: dict[str, Any]


def train(job: TrainingJob, worker: Worker) -> Outcome:
    """Train ``job`` on this rank, together with all others."""
    group = join(worker.world_size, job.parallelism.controller, worker.devices[0])
    if job.verify_layout:
        verify.check(job, worker, group)
    trainer = Trainer(job, worker, group)
    outcome = trainer.run()
    Store.leave(group)
    group.close()
    return outcome


class Trainer:
    """One rank of one training.

    :param group: all ranks.
    """

    def __init__(self, job: TrainingJob, worker: Worker, group: Group) -> None:
        job = job.effective()
        self._job, self._worker, self._group = job, worker, group
        self.setup = setup.build(job, worker, group)
        self.at = Position()
        self._layout = layouts.choose(job, self.setup, group, worker)
        alike = group.size > 1 and self._layout.data_size == group.size and not network.exchanging(self.setup.net)
        self._laps = Laps(active=alike)
        self._stragglers = Stragglers(self._host_of) if alike and group.rank == 0 else None
        self._step = Step(self._layout, self._laps)
        self._exchange = Exchange(group, self._layout.names, self._laps, self._layout.hint)
        self._saver: Saver | None = None
        self._checkpoints: Checkpoints | None = None
        if group.rank == 0 and worker.attempt is not None:
            self._checkpoints = Checkpoints(worker.attempt, keep=job.checkpoints.keep)
            self._saver = Saver(self._checkpoints)
        self._feed = Feed(
            self.setup.train, job.batch_size,
            rank=self._layout.data_rank, size=self._layout.data_size, device=worker.devices[0], dtype=job.dtype.value,
        )  # fmt: skip

    def run(self) -> Outcome:
        """Begin or go on, train to the end or until asked to stop."""
        self._begin()
        self._exchange.restart_clock()
        try:
            while self.at.epoch < self._job.epochs:
                if self._epoch():
                    return self._stopped()
            return self._finish()
        except NonFiniteError:
            if self._saver is not None:  # the last good checkpoint may still be on its way
                self._saver.drain(_DRAIN_S)
            raise
        finally:
            self._layout.close()

    def _begin(self) -> None:
        """Go on from the newest checkpoint, else from the initial weights; the same bits on all ranks."""
        reach(self._worker.job_key, f"starting-rank-{self._group.rank}")
        saved: list[Saved] = []
        with self._worker.busy(0):
            document = self._group.share(lambda: self._restore(saved))
        if document is not None:
            self._adopt(document, saved[0] if saved else None)
        elif self._job.init is not None:
            self._initialise(self._job.init)
        self._group.broadcast_(network.arrays(self.setup.net))
        self._group.check_equal(network.arrays(self.setup.net), where="before the first step")
        self._tell()

    def _restore(self, found: list[Saved]) -> dict[str, Any] | None:
        saved = self._checkpoints.newest() if self._checkpoints else None
        if saved is None:
            return None
        _check_arrays(saved, self._arrays())
        found.append(saved)
        log.info("going on from step %d of attempt %d", saved.step, saved.attempt)
        return saved.values

    def _adopt(self, document: dict[str, Any], saved: Saved | None) -> None:
        """Take a checkpoint's arrays (rank 0 has them) and position; rates and schedule come from the job alone."""
        arrays = self._arrays()
        if saved is not None:
            for name, array in arrays.items():
                array[:] = mx.nd.array(saved.arrays[name], dtype=array.dtype)
        self._group.broadcast_(arrays)
        self.setup.update.set_counts(document["counts"])
        self.at = Position.load(document["position"])

    def _initialise(self, init: Init) -> None:
        """Load an earlier model's weights on rank 0; the broadcast brings them to the others."""

        def load() -> dict[str, Any]:
            source = finetune.read(init.model_uri, self._job.storage)
            return finetune.load(self.setup.net, init, source, labels=self.setup.labels).to_document()

        with self._worker.busy(0):
            started: dict[str, Any] = self._group.share(load)
        self.at.started, self.at.parent = started, started["parent"]
        counts = {kind: len(started[kind]) for kind in ("loaded", "skipped", "new")}
        counts["frozen"] = len(self.setup.frozen)
        self._worker.log_metrics({f"init_{kind}": float(count) for kind, count in counts.items()}, step=0)
        log.info("parameters: %s", ", ".join(f"{count} {kind}" for kind, count in counts.items()))

    def _arrays(self) -> dict[str, mx.nd.NDArray]:
        """Return all that a checkpoint keeps: parameters and optimizer state."""
        kept = {f"param/{name}": array for name, array in network.arrays(self.setup.net).items()}
        return kept | {f"state/{name}": array for name, array in self.setup.update.state_arrays().items()}

    def _epoch(self) -> bool:
        """Train what is left of the running epoch; return whether to stop."""
        job, at = self._job, self.at
        rows = order(len(self.setup.train), seed=job.seed, epoch=at.epoch, shuffle=job.shuffle)
        stop = False
        for batch in self._laps.waiting(self._feed.batches(rows, at.offset // job.batch_size)):
            if self.setup.random:
                network.reseed(job.seed, self._group.rank, at.step)
            self._exchange.add(at.step + 1, self._step.make(batch, at.step + 1))
            at.step += 1
            at.offset += batch.total
            self._worker.beat(at.step)
            reach(self._worker.job_key, f"step-{at.step}-rank-{self._group.rank}")
            last = at.offset >= len(self.setup.train)
            save = self._saves_at(at.step) and not last
            if self._exchange.due or save or last:
                stop = self._meet()
            if (stop or save) and not last:
                self._save()
            if stop and not last:
                return True
        return self._end_epoch(stop)

    def _saves_at(self, step: int) -> bool:
        every = self._job.checkpoints.every_steps
        return every is not None and step % every == 0

    def _meet(self) -> bool:
        report = self._exchange.meet(stop=self._worker.should_stop())
        self.at.loss_sum += report.loss_sum
        self.at.examples += report.examples
        self.at.seconds += report.seconds
        if self._stragglers is not None:
            self._stragglers.look(report.times)
        self._record(report)
        return report.stop

    def _record(self, report: Report) -> None:
        epoch = self.at.epoch + 1
        for step, loss in report.losses.items():
            self._worker.log_metrics({"loss": loss}, step=step, epoch=epoch)
            self.at.metrics["loss"] = loss
        speed = report.examples / report.seconds if report.seconds > 0 else 0.0
        self._worker.log_metrics(
            {"learning_rate": report.learning_rate, "samples_per_s": speed}, step=self.at.step, epoch=epoch
        )
        self._tell(speed)

    def _tell(self, speed: float | None = None) -> None:
        self._worker.beat(self.at.step)
        self._worker.progress(
            epoch=min(self.at.epoch + 1, self._job.epochs),
            epochs=self._job.epochs,
            step=self.at.step,
            steps=self.setup.steps,
            samples_per_s=speed if speed is not None else self.at.samples_per_s,
            metrics=self.at.metrics,
        )

    def _end_epoch(self, stop: bool) -> bool:
        """Prove that all ranks agree, validate, save; return whether to stop."""
        at, done = self.at, self.at.epoch + 1
        self._layout.gather(state=False)
        self._group.check_equal(network.arrays(self.setup.net), where=f"after epoch {done}")
        metrics = {"train_loss": at.loss_sum / at.offset, **self._validate(), **self._layout.figures()}
        at.metrics |= metrics
        at.epoch, at.offset, at.loss_sum = done, 0, 0.0
        times = self._stragglers.figures() if self._stragglers is not None else {}
        self._worker.log_metrics(metrics | times, step=at.step, epoch=done)
        log.info("epoch %d of %d: %s", done, self._job.epochs, ", ".join(f"{k} {v:.5g}" for k, v in metrics.items()))
        self._tell()
        over = done == self._job.epochs
        every = self._job.checkpoints.every_epochs
        if over or stop or (every is not None and done % every == 0) or self._saves_at(at.step):
            self._save()
        reach(self._worker.job_key, f"epoch-{done}-rank-{self._group.rank}")
        self._exchange.restart_clock()
        return stop and not over

    def _validate(self) -> dict[str, float]:
        if self.setup.validation is None:
            return {}
        sums = score(
            self.setup.forward, self.setup.loss, self.setup.recipe.metrics(), self.setup.validation,
            group=self._group, device=self._worker.devices[0], dtype=self._job.dtype.value,
            beat=lambda: self._worker.beat(self.at.step),
        )  # fmt: skip
        return {f"validation_{name}": value for name, value in sums.items()}

    def _host_of(self, rank: int) -> str:
        """Return the name of a rank's host, as the supervisor has told the run store."""
        try:
            ranks = self._worker.attempt.read_state().ranks if self._worker.attempt is not None else []
            return str(ranks[rank]["host"])
        except (StoreError, LookupError):
            return "a host that nobody can name now"

    def _save(self) -> None:
        """Hand a snapshot to the saver, once it is known to be sound."""
        self._layout.gather(state=True)
        self._check_finite()
        if self._saver is None:
            return
        arrays = {name: array.asnumpy() for name, array in self._arrays().items()}
        values = {
            "position": self.at.dump(),
            "counts": self.setup.update.counts(),
            "seed": self._job.seed,
            "world_size": self._group.size,
            "optimizer": self._job.optimizer.name.value,
        }
        self._saver.save(arrays, values, step=self.at.step)

    def _check_finite(self) -> None:
        """Refuse to save weights that are not finite; they are the same on all ranks, so all refuse."""
        for name, array in network.arrays(self.setup.net).items():
            if not np.isfinite(array.asnumpy()).all():
                raise NonFiniteError(f"{name} is not finite after step {self.at.step}.", rank=self._group.rank)

    def _stopped(self) -> Outcome:
        """Wait until the checkpoint is published: a stop without it would lose what was trained."""
        if self._saver is not None:
            published = self._saver.drain(max(self._job.limits.grace_s, 1.0))
            self._saver.close()
            if not published:
                raise StoreError(f"asked to stop, but could not publish the checkpoint of step {self.at.step} in time.")
        return Outcome(True, {"state": "stopped", **self._numbers()})

    def _finish(self) -> Outcome:
        self._check_finite()
        result: dict[str, Any] = {"state": "done", **self._numbers()}
        if self._group.rank == 0 and self._worker.attempt_dir is not None:
            result["model_dir"] = str(self._export(self._worker.attempt_dir / "model"))
        if self._saver is not None:
            self._saver.drain(_DRAIN_S)
            self._saver.close()
        return Outcome(False, result)

    def _export(self, folder: Path) -> Path:
        examples = self.setup.validation or self.setup.train
        return export.write(
            folder, self.setup.forward, self.setup.recipe,
            labels=self.setup.labels, example=examples.x, classes=self.setup.outputs,
            dtype=self._job.dtype.value, parent=self.at.parent,
        )  # fmt: skip

    def _numbers(self) -> dict[str, Any]:
        finite = {name: value for name, value in self.at.metrics.items() if math.isfinite(value)}
        outputs = {"labels": self.setup.labels, "frozen": len(self.setup.frozen), "init": self.at.started}
        return {
            "metrics": finite, "model_dir": None, "outputs": outputs, "steps": self.at.step,
            "samples_per_s": self.at.samples_per_s,
        }  # fmt: skip


def _check_arrays(saved: Saved, wanted: dict[str, mx.nd.NDArray]) -> None:
    shapes = {name: tuple(array.shape) for name, array in saved.arrays.items()}
    expected = {name: tuple(array.shape) for name, array in wanted.items()}
    if shapes != expected:
        different = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        names = ", ".join(different[:5])
        raise CheckpointError(f"the checkpoint of step {saved.step} does not fit this network: {names}")
