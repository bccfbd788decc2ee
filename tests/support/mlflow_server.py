"""A real MLflow server for tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stack.mlflow import Mlflow
from support.guarding import guarded
from support.places import control_bin


@pytest.fixture(scope="session")
def mlflow_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    """The one server of the test run; tests ask for ``mlflow_server``."""
    with guarded(tmp_path_factory.mktemp("mlflow")) as folder:
        server = Mlflow(folder, program=str(control_bin() / "mlflow"))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def mlflow_server(mlflow_session: Mlflow) -> Mlflow:
    """An MLflow server on a free port, up when the test begins: ``url``, ``stop()``, ``kill()``, ``start()``,
    ``restart()`` on the same port with the same records. Without a password; its artifacts lie in a folder."""
    if not mlflow_session.alive():
        mlflow_session.start()  # an earlier test took it down
    return mlflow_session


@pytest.fixture(scope="session")
def secured_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    """An MLflow server that asks for ``credentials`` (MLFLOW_TRACKING_USERNAME and _PASSWORD)."""
    with guarded(tmp_path_factory.mktemp("secured-mlflow")) as folder:
        server = Mlflow(folder, program=str(control_bin() / "mlflow"), password="mxdist-test-password")
        server.start()
        yield server
        server.stop()
