"""Meets with its first mistake only after it has begun to train."""

from mxdist.runtime.worker import Worker

worker = Worker.current()
worker.log_metrics({"loss": 1.0}, step=1)
worker.log_metrcis({"loss": 0.5}, step=2)  # type: ignore[attr-defined]
