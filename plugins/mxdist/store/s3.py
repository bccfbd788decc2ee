"""The run store on S3: AWS, SeaweedFS, Ceph RGW and whatever keeps ``If-None-Match: *``."""

from __future__ import annotations

import functools
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from mxdist.errors import NotFound, StoreError
from mxdist.forks import ThreadLock
from mxdist.store.base import Entry, Store
from mxdist.store.opening import Credentials

_TRANSFER = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=16 << 20, max_concurrency=4)
_CONFLICT_PAUSES_S = (0.05, 0.2, 1.0, 3.0)
_ATTEMPTS = 10  # a server that asks to slow down is given a minute
_DELETE_AT_ONCE = 1000  # S3 refuses more in one request
_making_clients = ThreadLock()  # boto3's sessions are not safe to share, its clients are
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_PRESENT = {"412", "PreconditionFailed", "409", "ConditionalRequestConflict"}


def connect(endpoint_url: str | None, region: str | None, credentials: Credentials | None) -> Any:
    """Return a boto3 client that works on AWS and on the servers that only nearly are.

    Checksums only where S3 demands them: trailers are refused by Ceph 16 and stored inside the object by others.
    """
    keys = credentials or Credentials.from_environment()
    with _making_clients.held():
        return _session().client(
            "s3",
            endpoint_url=endpoint_url,
            region_name=region or "us-east-1" if endpoint_url else region,
            aws_access_key_id=keys.access_key,
            aws_secret_access_key=keys.secret_key,
            aws_session_token=keys.session_token,
            config=Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "adaptive", "total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS))},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"} if endpoint_url else {},
            ),
        )


@functools.cache
def _session() -> Any:
    """Return the one session of this process: each new one reads S3's description anew, ten times a client's cost."""
    return boto3.session.Session()


class S3Store(Store):
    """Objects under ``s3://bucket/prefix/``."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client = client
        self._bucket = bucket
        self._root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.uri = f"s3://{bucket}/{self._root}".rstrip("/")

    @classmethod
    def connect(
        cls, bucket: str, prefix: str, *, endpoint_url: str | None, region: str | None, credentials: Credentials | None
    ) -> S3Store:
        """Return the store of ``prefix`` in ``bucket``."""
        return cls(connect(endpoint_url, region, credentials), bucket, prefix)

    def read(self, key: str) -> bytes:
        answer = self._call("read", key, self._client.get_object, Bucket=self._bucket, Key=self._root + key)
        try:
            data: bytes = answer["Body"].read()
        except (BotoCoreError, OSError) as error:
            raise self._failed("read", key, error) from error
        return data

    def write(self, key: str, data: bytes) -> None:
        self._call("write", key, self._client.put_object, Bucket=self._bucket, Key=self._root + key, Body=data)

    def create(self, key: str, data: bytes) -> bool:
        target = {"Bucket": self._bucket, "Key": self._root + key}
        for pause_s in _CONFLICT_PAUSES_S:
            try:
                self._client.put_object(**target, Body=data, IfNoneMatch="*")
            except ClientError as error:
                if _code(error) not in _PRESENT:
                    raise self._failed("create", key, error) from error
                try:
                    return self.read(key) == data
                except NotFound:  # lost to a create that then failed, or to a delete: try again
                    time.sleep(pause_s)
                    continue
            except BotoCoreError as error:
                raise self._failed("create", key, error) from error
            return True
        raise StoreError(f"cannot create {self.uri}/{key}: the server says that it is there, and that it is not.")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Entry]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._root + prefix, **({"StartAfter": self._root + after} if after else {})
        )
        found: list[Entry] = []
        try:
            for page in pages:
                for item in page.get("Contents", ()):
                    found.append(Entry(item["Key"][len(self._root) :], item["Size"]))
        except (ClientError, BotoCoreError) as error:
            raise self._failed("list", prefix, error) from error
        # Not every server lists in binary order around "/", so the order is ours.
        yield from sorted((entry for entry in found if entry.key > after), key=lambda entry: entry.key)

    def exists(self, key: str) -> bool:
        try:
            self._call("look for", key, self._client.head_object, Bucket=self._bucket, Key=self._root + key)
        except NotFound:
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _DELETE_AT_ONCE):
            batch = [{"Key": self._root + key} for key in keys[start : start + _DELETE_AT_ONCE]]
            delete = {"Objects": batch, "Quiet": True}
            answer = self._call("delete", keys[start], self._client.delete_objects, Bucket=self._bucket, Delete=delete)
            for failed in answer.get("Errors", ()):
                raise StoreError(
                    f"cannot delete s3://{self._bucket}/{failed['Key']}: {failed.get('Message', failed['Code'])}"
                )

    def upload(self, key: str, path: Path) -> None:
        self._call("upload", key, self._client.upload_file, str(path), self._bucket, self._root + key, Config=_TRANSFER)

    def download(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{uuid.uuid4().hex}")
        try:
            self._call(
                "download",
                key,
                self._client.download_file,
                self._bucket,
                self._root + key,
                str(partial),
                Config=_TRANSFER,
            )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def child(self, prefix: str) -> S3Store:
        return S3Store(self._client, self._bucket, f"{self._root}{prefix}")

    def _call(self, verb: str, key: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ClientError as error:
            if _code(error) in _ABSENT:
                raise NotFound(f"{self.uri}/{key} does not exist") from None
            raise self._failed(verb, key, error) from error
        except (BotoCoreError, OSError) as error:
            raise self._failed(verb, key, error) from error
        except Exception as error:  # boto3.exceptions.S3UploadFailedError and kin share no base class
            if type(error).__module__.startswith(("boto3", "s3transfer")):
                raise self._failed(verb, key, error) from error
            raise

    def _failed(self, verb: str, key: str, error: Exception) -> StoreError:
        code = _code(error) if isinstance(error, ClientError) else type(error).__name__
        where = f"{self.uri}/{key}".rstrip("/")
        endpoint = self._client.meta.endpoint_url
        if code in {"NoCredentialsError", "PartialCredentialsError"}:
            return StoreError(
                f"cannot {verb} {where}: there are no credentials for {endpoint}.",
                hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or login and password of the connection.",
                retryable=False,
            )
        if code in {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "403"}:
            return StoreError(
                f"cannot {verb} {where}: {endpoint} refused the credentials ({code}).",
                hint="Check the access key and the secret key of the connection.",
                retryable=False,
            )
        if code == "NoSuchBucket":
            return StoreError(
                f"cannot {verb} {where}: there is no bucket {self._bucket!r} at {endpoint}.", retryable=False
            )
        if isinstance(error, BotoCoreError):
            return StoreError(f"cannot {verb} {where}: {endpoint} did not answer ({code}).", hint="Is the server up?")
        return StoreError(f"cannot {verb} {where}: {error}")


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
