"""A real S3 server for tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stack.seaweed import Seaweed
from support.guarding import guarded
from support.places import control_bin


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """SeaweedFS on a free port, empty: ``endpoint_url``, ``credentials``, ``access_key``, ``make_bucket()``,
    ``client()``, and ``stop()``, ``kill()``, ``start()``, ``restart()`` on the same port with the same data."""
    with guarded(tmp_path_factory.mktemp("seaweed")) as folder:
        server = Seaweed(
            folder, access_key="mxdist-test", secret_key="mxdist-test-secret", weed=str(control_bin() / "weed")
        )
        server.start()
        yield server
        server.stop()


@pytest.fixture
def bucket(seaweed: Seaweed) -> str:
    """A fresh, empty bucket."""
    if not seaweed.alive():
        seaweed.start()  # an earlier test took it down
    return seaweed.make_bucket()
