"""From a URI to a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mxdist.errors import Problem, SpecError
from mxdist.store.base import Store


@dataclass(frozen=True)
class Credentials:
    """S3 access; without a key, boto3's own search (environment, profile, instance role) applies."""

    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Credentials:
        """Return what AWS's own variables say."""
        get = environment.get
        return cls(get("AWS_ACCESS_KEY_ID"), get("AWS_SECRET_ACCESS_KEY"), get("AWS_SESSION_TOKEN"))


def open_store(
    uri: str, *, endpoint_url: str | None = None, region: str | None = None, credentials: Credentials | None = None
) -> Store:
    """Return the store at ``s3://bucket/prefix``, ``file:///folder`` or ``/folder``.

    :raises SpecError: the URI is of no known kind, or has no bucket or folder.
    """
    parts = urlsplit(uri)
    if parts.scheme == "s3" and parts.netloc:
        from mxdist.store.s3 import S3Store

        return S3Store.connect(
            parts.netloc, parts.path, endpoint_url=endpoint_url, region=region, credentials=credentials
        )
    if parts.scheme in ("", "file") and parts.path.startswith("/"):
        from mxdist.store.folder import FolderStore

        return FolderStore(Path(unquote(parts.path) if parts.scheme else uri))
    problem = "must be s3://bucket/prefix, file:///folder or an absolute path"
    raise SpecError(f"The store URI {uri!r}", [Problem("", problem)])
