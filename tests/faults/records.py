"""What an MLflow server says of a job, asked by its own REST API and not by mxdist's client."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

JOB_TAG = "mxdist.job_key"
PARENT_TAG = "mxdist.parent"
_ALL = 50_000


@dataclass(frozen=True)
class Record:
    """One MLflow run."""

    run_id: str
    status: str
    tags: dict[str, str]


class Records:
    """All runs of a server.

    :param url: the server.
    """

    def __init__(self, url: str) -> None:
        self._api = f"{url}/api/2.0/mlflow"

    def of_job(self, job_key: str) -> list[Record]:
        """Return the runs of a job, oldest first."""
        return self._tagged(JOB_TAG, job_key)

    def parents(self, key: str) -> list[Record]:
        """Return the parent runs with a key, oldest first."""
        return self._tagged(PARENT_TAG, key)

    def _tagged(self, tag: str, value: str) -> list[Record]:
        experiments = self._post("experiments/search", {"max_results": 1000}).get("experiments", [])
        query = {
            "experiment_ids": [item["experiment_id"] for item in experiments],
            "filter": f"tags.`{tag}` = '{value}'",
            "order_by": ["attributes.start_time ASC"],
        }
        return [_record(run) for run in self._post("runs/search", query).get("runs", [])]

    def history(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """Return every point of a metric as (step, value), by step; what was sent twice is there twice."""
        query = urlencode({"run_id": run_id, "metric_key": metric, "max_results": _ALL})
        points = self._send(f"metrics/get-history?{query}", None).get("metrics", [])
        return sorted((int(point["step"]), float(point["value"])) for point in points)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._send(path, json.dumps(body).encode())

    def _send(self, path: str, data: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._api}/{path}", data=data, headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - ours, on loopback
            found: dict[str, Any] = json.load(answer)
        return found


def _record(run: dict[str, Any]) -> Record:
    tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
    return Record(run["info"]["run_id"], run["info"]["status"], tags)
