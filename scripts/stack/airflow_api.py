"""Airflow's REST API, as far as a demo and tests need it. Standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

_HEALTH_S = 10.0  # is asked again and again


class ApiError(Exception):
    """The API refused, or did not answer.

    :param status: the HTTP status, or 0 without an answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class AirflowApi:
    """A client that logs in when it must, and again when its token ran out."""

    def __init__(self, url: str, username: str, password: str) -> None:
        self.url = url
        self._login = {"username": username, "password": password}
        self._token = ""

    def health(self) -> dict[str, Any]:
        """Return the health of all components, or nothing if the API server does not answer."""
        try:
            answer: dict[str, Any] = self._send("GET", "/api/v2/monitor/health", None, {}, timeout_s=_HEALTH_S)
        except ApiError:
            return {}
        return answer if answer.get("metadatabase", {}).get("status") == "healthy" else {}

    def get(self, path: str, **query: Any) -> Any:
        """GET ``/api/v2/<path>``."""
        return self.call("GET", f"{path}?{urlencode(query, doseq=True)}" if query else path)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST to ``/api/v2/<path>``."""
        return self.call("POST", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """PATCH ``/api/v2/<path>``."""
        return self.call("PATCH", path, body)

    def delete(self, path: str) -> Any:
        """DELETE ``/api/v2/<path>``."""
        return self.call("DELETE", path)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request with a token.

        :raises ApiError: with the server's own words.
        """
        for last in (False, True):
            if not self._token:
                self._token = self._send("POST", "/auth/token", self._login, {})["access_token"]
            try:
                return self._send(method, f"/api/v2/{path}", body, {"Authorization": f"Bearer {self._token}"})
            except ApiError as error:
                if last or error.status != 401:
                    raise
                self._token = ""
        raise AssertionError("the loop above returns or raises")

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, **more: Any) -> str:
        """Start a DAG run and return its id."""
        body = {"logical_date": None, "conf": dict(conf or {}), **more}
        return str(self.post(f"dags/{quote(dag_id)}/dagRuns", body)["dag_run_id"])

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """Return a DAG run."""
        answer: dict[str, Any] = self.get(run_path(dag_id, run_id))
        return answer

    def tasks(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """Return the task instances of a DAG run, by task id (mapped ones: the last)."""
        found = self.get(f"{run_path(dag_id, run_id)}/taskInstances", limit=100)["task_instances"]
        return {item["task_id"]: item for item in found}

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """Return what a task handed over, or None."""
        path = f"{run_path(dag_id, run_id)}/taskInstances/{quote(task_id)}/xcomEntries/{quote(key)}"
        try:
            return self.get(path, deserialize="false", stringify="false")["value"]
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: dict[str, str], timeout_s: float = 90
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - ours, on loopback
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read().decode(errors="replace")[:2000]
            raise ApiError(f"Airflow answered {error.code} to {method} {path}: {detail}", error.code) from None
        except OSError as error:
            raise ApiError(f"Airflow at {self.url} does not answer: {error}") from None
        return json.loads(text) if text else None


def run_path(dag_id: str, run_id: str) -> str:
    """Return the path of a DAG run, below ``/api/v2``."""
    return f"dags/{quote(dag_id)}/dagRuns/{quote(run_id, safe='')}"
