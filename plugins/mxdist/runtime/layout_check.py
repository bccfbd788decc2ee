"""Whether a network can be cut as its job wants: ``python -m mxdist.runtime.layout_check`` before anything is started.

Reads a job from stdin, builds its network as a graph (no data, no weights) and prints ``{"problems": [[field, what is
wrong], ...]}``. Only networks that mxdist has by name are looked at: a recipe's may depend on its data.
"""

from __future__ import annotations

import json
import sys

from mxdist.errors import SpecError
from mxdist.runtime.parallel import partition
from mxdist.runtime.recipe import Recipe
from mxdist.spec import Model, TrainingJob, parse_job
from mxdist.spec.networks import DECODERS

_CLASSES = 2  # where nobody says how many: the layers are the same


def problems(job: TrainingJob) -> list[tuple[str, str]]:
    """Return what is wrong with the cuts or stages of ``job``: field and message; empty if nothing is."""
    if job.model is None or job.model.name is None or not job.parallelism.staged:
        return []
    recipe = Recipe(job.model)
    recipe.learn_classes(len(job.dataset.labels) if job.dataset and job.dataset.labels else _CLASSES)
    layers = partition.layers_of(recipe.network())
    try:
        partition.check_separate(layers, partition.begin(layers, job.parallelism, None))
    except SpecError as error:
        return [(problem.path, problem.message + _way_out(job.model)) for problem in error.problems]
    return []


def _way_out(model: Model) -> str:
    tied = model.name in DECODERS and model.params.get("tied", True)
    return "; with model.params.tied false, the output layer has a matrix of its own" if tied else ""


def main() -> None:
    """Answer for the job on stdin."""
    job = parse_job(json.load(sys.stdin))
    print(json.dumps({"problems": problems(job) if isinstance(job, TrainingJob) else []}))


if __name__ == "__main__":
    main()
