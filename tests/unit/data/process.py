"""Stage or fetch in a process of its own: ``process.py '{"do": "stage", ...}'``; prints one JSON document."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import spy  # type: ignore[import-not-found]

import mxdist.store.s3
from mxdist.data.fetch import fetch
from mxdist.data.stage import stage
from mxdist.spec.cluster import Storage
from mxdist.spec.dataset import Split


def main(order: dict[str, Any]) -> dict[str, Any]:
    requests = spy.Requests()
    mxdist.store.s3.connect = requests.wrap(mxdist.store.s3.connect)
    storage = Storage(endpoint_url=order.pop("endpoint_url", None), region=None)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer: Any
    if order.pop("do") == "stage":
        split = order.pop("split", None)
        answer = dict(stage(**order, split=split and Split.parse(split), storage=storage))
    else:
        answer = str(fetch(cache=Path(order.pop("cache")), **order, storage=storage))
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"answer": answer, "requests": requests.seen, "grown_mib": (after_kib - before_kib) // 1024}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
