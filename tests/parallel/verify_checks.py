"""One rank that verifies sound and broken layouts, one after the other: ``python verify_checks.py CASES.json``.

Cases are jobs with a mutation each; what rank 0 was told about each is written beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from parallel.mutant import MUTATIONS

from mxdist.errors import TrainingFailed
from mxdist.runtime import batches, network, update, verify
from mxdist.runtime.parallel import AllReduce, Group, layout
from mxdist.runtime.worker import Worker
from mxdist.spec import TrainingJob, parse_job

CHANGED: tuple[Any, ...] = (AllReduce, Group, layout.Layout, batches, network, update)


def verdict(job: TrainingJob, mutation: str, worker: Worker, group: Group) -> str:
    """Return what verifying a job says under a mutation; "" if nothing. All is as before afterwards."""
    before = [dict(vars(one)) for one in CHANGED]
    MUTATIONS[mutation]()
    try:
        verify.check(job, worker, group)
    except TrainingFailed as error:
        return error.message
    finally:
        for one, attributes in zip(CHANGED, before, strict=True):
            for name, value in attributes.items():
                if vars(one)[name] is not value:
                    setattr(one, name, value)
    return ""


if __name__ == "__main__":
    path = Path(sys.argv[1])
    worker, joined = Worker.current(), AllReduce()
    told = {}
    for key, (document, mutation) in json.loads(path.read_text()).items():
        job = parse_job(document)
        assert isinstance(job, TrainingJob)
        told[key] = verdict(job, mutation, worker, joined)
    if joined.rank == 0:
        path.with_name("told.json").write_text(json.dumps(told))
    joined.close()
