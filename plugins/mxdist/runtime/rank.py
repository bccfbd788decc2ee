"""One rank: ``python -m mxdist.runtime.rank``, with the world in its environment.

A script replaces this process (``exec``), so that it runs exactly as if it had been started by hand. A model is trained
by ``loop``. The exit code tells the supervisor what to do: see ``exit_codes``.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from mxdist.errors import MxdistError, NonFiniteError
from mxdist.runtime import exit_codes
from mxdist.runtime.parent import die_with_parent
from mxdist.runtime.worker import Worker
from mxdist.spec import Controller, EvaluationJob, Script, TrainingJob

log = logging.getLogger(__name__)

_LOST_WORLD = ("horovod", "gloo", "connection reset", "connection closed", "shut down", "nccl", "cuda")


def main() -> NoReturn:
    """Run this rank and exit with the code that says how it ended."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    worker = Worker.current()
    try:
        job = worker.job
        if isinstance(job, TrainingJob) and job.script is not None:
            _check_controller(job)
            run_script(job.script)
        code = _run(job, worker)
    except BaseException as error:  # whatever it is, the supervisor must learn of it
        _leave(_failed(error, worker))  # here, where the error still holds what must not be destroyed
    _leave(code)


def _run(job: TrainingJob | EvaluationJob | None, worker: Worker) -> int:
    if isinstance(job, EvaluationJob):
        from mxdist.runtime import evaluate

        worker.write_result(evaluate.run(job, worker))
        return exit_codes.DONE
    if job is None:
        raise MxdistError("this process was started outside of a job: MXDIST_WORLD_DIR is not set.")
    from mxdist.runtime import loop

    outcome = loop.train(job, worker)
    worker.write_result(outcome.result)
    return exit_codes.STOPPED if outcome.stopped else exit_codes.DONE


def _check_controller(job: TrainingJob) -> None:
    """Refuse MPI for a script when this host's Horovod has none; ``hvd.init()`` would say less."""
    if job.parallelism.controller is Controller.MPI:
        import horovod.mxnet as hvd

        from mxdist.runtime.parallel.allreduce import check_built

        check_built(hvd, job.parallelism.controller, on_gpu=False)


def run_script(script: Script) -> NoReturn:
    """Become the user's script, with its own arguments, in the folder that the supervisor chose."""
    path = Path(script.path).resolve()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, str(path), *script.args])


def _failed(error: BaseException, worker: Worker) -> int:
    traceback.print_exception(error)
    code, kind = classify(error)
    message = str(error) or type(error).__name__
    if not isinstance(error, MxdistError):
        message = f"{type(error).__name__}: {message}"
    worker.write_result(
        {"state": "failed", "error": {"kind": kind, "message": message[:4000], "retryable": code == exit_codes.RETRY}}
    )
    return code


def classify(error: BaseException) -> tuple[int, str]:
    """Return the exit code for an error, and its kind for the result.

    What mxdist raises says itself whether trying again can help. Of the rest, what comes from outside (the network, the
    disk, memory, a world that fell apart) is tried again, and what the user's code raises is not.
    """
    if isinstance(error, NonFiniteError):
        return exit_codes.NONFINITE, "nonfinite"
    if isinstance(error, MxdistError):
        kind = {"DataError": "data", "SpecError": "user_error"}.get(type(error).__name__, type(error).__name__)
        return (exit_codes.RETRY if error.retryable else exit_codes.USER_ERROR), kind
    if isinstance(error, OSError | MemoryError | KeyboardInterrupt) or _world_lost(error):
        return exit_codes.RETRY, "rank_exit"
    if isinstance(error, SystemExit) and error.code == exit_codes.STOPPED:
        return exit_codes.STOPPED, "preempted"
    return exit_codes.USER_ERROR, "user_error"


def _world_lost(error: BaseException) -> bool:
    """Return whether another rank, or the device, went away: its own exit tells why, this one is only a victim."""
    text = f"{type(error).__module__}.{type(error).__name__}: {error}".lower()
    ours: Any = type(error).__module__.split(".")[0]
    return ours in {"mxnet", "horovod"} and any(word in text for word in _LOST_WORLD)


def _leave(code: int) -> NoReturn:
    """End at once: destructors of a world that fell apart can hang, and there is nothing left for them to do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
