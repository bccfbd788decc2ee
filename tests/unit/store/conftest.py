"""Every test of the store runs against a folder and against a real S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from mxdist.store import Credentials, Store, open_store


@pytest.fixture(params=["folder", "s3"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Return a function that opens the same empty store anew, as another process would."""
    if request.param == "folder":
        return lambda: open_store(str(tmp_path / "runs"))
    seaweed = request.getfixturevalue("seaweed")
    bucket = seaweed.make_bucket()
    uri = f"s3://{bucket}/runs-{uuid.uuid4().hex[:8]}"
    return lambda: open_store(
        uri, endpoint_url=seaweed.endpoint_url, credentials=Credentials.from_environment(seaweed.credentials)
    )


@pytest.fixture
def store(open_again: Callable[[], Store]) -> Store:
    """Return an empty store."""
    return open_again()
