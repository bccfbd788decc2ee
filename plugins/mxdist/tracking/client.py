"""A client of MLflow whose every call is bounded, and whose errors say what to do.

MLflow's own defaults are 7 retries of 120 seconds each. They are set by environment variables only, so a call here sets
them, and takes them back: whatever else runs in the process keeps its own.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mxdist.errors import TrackingError
from mxdist.forks import ThreadLock, no_fork

CALL_TIMEOUT_S = 10
UPLOAD_TIMEOUT_S = 120

_LOCK = ThreadLock()
_BEFORE: list[dict[str, str | None]] = []  # what to take back, outermost first
_TRANSIENT = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED", "ABORTED", ""}
_FIXED = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_UV_AUTO_DETECT": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}


@dataclass(frozen=True)
class Login:
    """Who asks. Without a name or a token, MLflow's own variables (MLFLOW_TRACKING_USERNAME, ...) apply."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    @classmethod
    def from_secrets(cls, secrets: Mapping[str, str]) -> Login:
        """Return the login that MLflow's variables, given as a mapping, describe."""
        get = secrets.get
        return cls(get("MLFLOW_TRACKING_USERNAME"), get("MLFLOW_TRACKING_PASSWORD"), get("MLFLOW_TRACKING_TOKEN"))

    def environment(self) -> dict[str, str | None]:
        """Return what MLflow reads; None is for what must not be there."""
        known = {
            "MLFLOW_TRACKING_USERNAME": self.username,
            "MLFLOW_TRACKING_PASSWORD": self.password,
            "MLFLOW_TRACKING_TOKEN": self.token,
        }
        return dict(known) if any(known.values()) else {}


@contextmanager
def bounded(timeout_s: int | None = None, login: Login | None = None) -> Iterator[None]:
    """Run MLflow code with these bounds and this login; one thread at a time, since both live in the environment."""
    wanted: dict[str, str | None] = {**_FIXED, "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s or CALL_TIMEOUT_S)}
    wanted |= login.environment() if login else {}
    with _LOCK.held():
        before = {name: os.environ.get(name) for name in wanted}
        _BEFORE.append(before)
        try:
            _set(wanted)
            yield
        finally:
            _set(before)
            _BEFORE[-1:] = []


def _take_back() -> None:
    """Give a forked child the environment as it was: the thread that would do so is not there."""
    while _BEFORE:
        _set(_BEFORE.pop())


os.register_at_fork(after_in_child=_take_back)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
            os.unsetenv(name)  # a fork may come between the two steps of setting it
        else:
            os.environ[name] = value


def load_mlflow() -> Any:
    """Return the module ``mlflow``, imported now and not before, and told to send nothing about its use anywhere."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        with no_fork():
            import mlflow
    except ImportError as error:
        raise TrackingError(
            f"MLflow cannot be imported: {error}.", hint="Install mlflow-skinny in this environment.", retryable=False
        ) from error
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    return mlflow


class Client:
    """Calls one MLflow server.

    :param uri: the server, as in ``http://127.0.0.1:5000``.
    """

    def __init__(self, uri: str, login: Login | None = None) -> None:
        self.uri = uri.rstrip("/")
        self._login = login
        self._client: Any = None

    def call(self, function: str, *args: Any, timeout_s: int | None = None, **kwargs: Any) -> Any:
        """Return what ``MlflowClient.<function>`` returns.

        :param timeout_s: of each HTTP request, by default 10 s; none is repeated here.
        :raises TrackingError: the server could not be reached (``retryable``), or refused.
        """
        with bounded(timeout_s, self._login):
            try:
                if self._client is None:
                    self._client = load_mlflow().MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
                return getattr(self._client, function)(*args, **kwargs)
            except TrackingError:
                raise
            except Exception as error:
                raise _explained(self.uri, function, error) from error

    def find(self, function: str, *args: Any, **kwargs: Any) -> Any | None:
        """Return what the call returns, or None when the server says that there is no such thing."""
        try:
            return self.call(function, *args, **kwargs)
        except TrackingError as error:
            if code_of(error) in {"RESOURCE_DOES_NOT_EXIST", "ENDPOINT_NOT_FOUND"}:
                return None
            raise


def code_of(error: BaseException) -> str:
    """Return MLflow's own code (``INVALID_PARAMETER_VALUE``) of an error that ``Client`` raised, or ''."""
    return str(getattr(error.__cause__, "error_code", "") or "")


def refused_for_good(error: TrackingError) -> bool:
    """Return whether the same request will never be taken: it cannot be written down, or the server calls it wrong."""
    cause = error.__cause__
    unwritable = isinstance(cause, ValueError | TypeError) and not isinstance(cause, OSError)
    return unwritable or code_of(error) in {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"}


def entities(kind: str, rows: Iterator[Mapping[str, Any]] | list[dict[str, Any]]) -> list[Any]:
    """Return ``mlflow.entities.<kind>`` of each row: Metric, Param or RunTag."""
    load_mlflow()
    from mlflow import entities as known

    make = getattr(known, kind)
    return [make(**row) for row in rows]


def _explained(uri: str, function: str, error: Exception) -> TrackingError:
    text = " ".join(str(error).split())
    code = str(getattr(error, "error_code", "") or "")
    status = re.search(r"error code (\d{3})", text)
    if "Invalid Host header" in text:
        hint = "Start the server with --allowed-hosts, naming this host and port and those it had by default."
        return TrackingError(f"MLflow at {uri} refused its own host name (403, Invalid Host header).", hint=hint)
    if code in {"UNAUTHENTICATED", "PERMISSION_DENIED"} or (status and status[1] in {"401", "403"}):
        hint = "Check the user name and the password or token of the MLflow connection."
        return TrackingError(f"MLflow at {uri} refused the login.", hint=hint, retryable=False)
    if "failed with timeout" in text or "failed with exception" in text:
        return TrackingError(f"MLflow at {uri} did not answer ({function}): {_short(text)}", hint="Is the server up?")
    return TrackingError(f"MLflow at {uri} refused {function}: {_short(text)}", retryable=code in _TRANSIENT)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."
