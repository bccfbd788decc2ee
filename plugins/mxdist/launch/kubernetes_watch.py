"""The MPIJobs of a namespace, kept up to date by the API server's own events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from mxdist.launch.kubernetes_api import Gone, KubernetesApi

_ONE_WATCH_S = 240  # then the next one begins where it stopped: proxies cut connections that are older
_SHORT_S = 1.0


class JobWatch:
    """All MPIJobs with certain labels.

    It lists them once and then goes on from event to event. Bookmarks keep its place fresh while nothing happens; when
    the server has forgotten that place all the same (410 Gone), it lists again.

    :param selector: the labels.
    :param version: where an earlier watch stopped; None: list first.
    """

    def __init__(self, api: KubernetesApi, namespace: str, selector: str, *, version: str | None = None) -> None:
        self._api, self._namespace, self._selector = api, namespace, selector
        self.version = version
        self.lists = 0
        self._jobs: dict[str, dict[str, Any]] = {}

    def snapshots(self, timeout_s: float) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield all MPIJobs by their names, at first and after every change, until the time is over.

        :raises LaunchError: the server cannot be asked.
        """
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            try:
                if self.version is None:
                    self._list()
                    yield dict(self._jobs)
                begun = time.monotonic()
                yield from self._changes(min(_ONE_WATCH_S, math.ceil(left)))
                if time.monotonic() - begun < _SHORT_S:  # a proxy that lets nothing through must not be run down
                    time.sleep(min(_SHORT_S, left))
            except Gone:
                self.version = None

    def _list(self) -> None:
        found, self.version = self._api.jobs(self._namespace, self._selector)
        self.lists += 1
        self._jobs = {one["metadata"]["name"]: one for one in found}

    def _changes(self, seconds: int) -> Iterator[dict[str, dict[str, Any]]]:
        for event in self._api.watch_jobs(self._namespace, self._selector, str(self.version), seconds):
            job = event["object"]
            self.version = job["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            if event["type"] == "DELETED":
                self._jobs.pop(job["metadata"]["name"], None)
            else:
                self._jobs[job["metadata"]["name"]] = job
            yield dict(self._jobs)
