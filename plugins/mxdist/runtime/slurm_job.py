"""The Slurm job that this supervisor is the batch step of: will it come back, and can it be given back?

Who is asked to end cannot tell by the signal whether Slurm will start the job again (a requeue, preemption) or not
(``scancel``, the time limit). Slurm can: a job that goes back into the queue has a higher restart count at once.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Mapping

from mxdist.spec import EvaluationJob, TrainingJob
from mxdist.spec.cluster import ClusterKind

log = logging.getLogger("mxdist.slurm")

_ASK_S = 15.0


class SlurmJob:
    """One run of a Slurm job.

    :param restarts: how often Slurm had started it again when this run began.
    """

    def __init__(self, number: str, restarts: int) -> None:
        self.number, self.restarts = number, restarts

    def comes_back(self) -> bool:
        """Return whether Slurm starts the job again when this run has ended.

        A preempted job that ends within its time of grace would count as done: it goes back into the queue by itself.
        """
        shown = self._show()
        if int(shown.get("Restarts") or 0) > self.restarts:
            return True
        preempted = (shown.get("PreemptTime") or "None") not in ("None", "N/A", "Unknown")
        return preempted and self.give_back(shown)

    def give_back(self, shown: Mapping[str, str] | None = None) -> bool:
        """Put the job back into the queue, for nodes that work; return whether Slurm does so."""
        if (shown or self._show()).get("Requeue") != "1":
            return False
        return self._ask("requeue", self.number) is not None

    def _show(self) -> dict[str, str]:
        said = self._ask("--oneliner", "show", "job", self.number) or ""
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def _ask(self, *words: str) -> str | None:
        try:
            done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=_ASK_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("scontrol %s: %s", words[0], error)
            return None
        if done.returncode:
            log.warning("scontrol %s: %s", words[0], done.stderr.strip())
        return None if done.returncode else done.stdout


def slurm_job(job: TrainingJob | EvaluationJob, environment: Mapping[str, str] = os.environ) -> SlurmJob | None:
    """Return the Slurm job that this process is part of, if ``job`` runs on Slurm."""
    number = environment.get("SLURM_JOB_ID")
    if job.cluster.kind is not ClusterKind.SLURM or not number:
        return None
    return SlurmJob(number, int(environment.get("SLURM_RESTART_COUNT") or 0))
