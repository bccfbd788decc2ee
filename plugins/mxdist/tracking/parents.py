"""The parent runs that are still open at an MLflow server."""

from __future__ import annotations

from collections.abc import Iterable

from mxdist.tracking.client import Client, Login
from mxdist.tracking.runs import PARENT_TAG

_AT_MOST = 10_000  # more wait until next time


def open_parents(uri: str, *, login: Login | None = None) -> dict[str, list[str]]:
    """Return the ids of all parent runs that MLflow calls RUNNING, by their key.

    :raises TrackingError: MLflow cannot be reached, or refuses.
    """
    client = Client(uri, login)
    experiments = [item.experiment_id for item in client.call("search_experiments", max_results=1000)]
    if not experiments:
        return {}
    wanted = f"tags.`{PARENT_TAG}` LIKE '%' and attributes.status = 'RUNNING'"
    found: dict[str, list[str]] = {}
    for run in client.call("search_runs", experiments, filter_string=wanted, max_results=_AT_MOST):
        found.setdefault(run.data.tags[PARENT_TAG], []).append(run.info.run_id)
    return found


def close(uri: str, run_ids: Iterable[str], status: str, *, login: Login | None = None) -> None:
    """Close runs.

    :param status: FINISHED, FAILED or KILLED.
    :raises TrackingError: MLflow cannot be reached, or refuses; asking again is safe.
    """
    client = Client(uri, login)
    for run_id in run_ids:
        client.call("set_terminated", run_id, status=status)
