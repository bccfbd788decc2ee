"""A training in this process: one rank, real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel.worlds import Jobs

from mxdist.runtime import loop
from mxdist.runtime.parallel import Alone
from mxdist.runtime.worker import Worker
from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.store import Attempt


def worker_of(jobs: Jobs, attempt: Attempt) -> Worker:
    """Return the worker of rank 0 in a world of one."""
    folder = jobs.folder(attempt) / "world-1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(attempt.claim.job))
    return Worker(
        attempt_dir=folder.parent,
        world_dir=folder,
        runs_uri=str(jobs.root / "runs"),
        job_key=attempt.claim.job_key,
        attempt=attempt.number,
    )


def trainer_of(jobs: Jobs, key: str, **fields: Any) -> loop.Trainer:
    """Return the trainer of a new job."""
    attempt = jobs.claim(jobs.job(**fields), key)
    job = attempt.claim.parsed()
    assert isinstance(job, TrainingJob)
    return loop.Trainer(job, worker_of(jobs, attempt), Alone())


def trained_model(jobs: Jobs, key: str, **fields: Any) -> str:
    """Train a job to its end, publish its model, return the model's URI."""
    outcome = trainer_of(jobs, key, **fields).run()
    return jobs.publish(key, Path(outcome.result["model_dir"]))


def evaluation(jobs: Jobs, scored: dict[str, str], **fields: Any) -> EvaluationJob:
    """Return an evaluation of models on the dataset's test split."""
    document = {"kind": "evaluation", "name": "eval", "models": scored, "dataset": jobs.dataset}
    return EvaluationJob.parse({**document, **fields})
