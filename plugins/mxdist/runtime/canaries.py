"""Canaries of the probe: what a node can write to and read from the run store, datasets and MLflow.

Like the probe itself, it is sent to a node as text, and imports the standard library alone; boto3 where it is used.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MLFLOW_S = 6.0


def runs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write a canary into the run store, read it back, remove it; and read the one that the submitter wrote."""
    place = request["runs"]
    store = _store(place["uri"], request)
    key, data = f"_preflight/{place['nonce']}-{uuid.uuid4().hex}", uuid.uuid4().hex.encode()
    begin = time.monotonic()
    store.put(key, data)
    try:
        if store.get(key) != data:
            raise OSError(f"{place['uri']} gave back other bytes than were written")
    finally:
        store.delete(key)
    if place.get("token") and store.get(f"_preflight/{place['nonce']}") != place["token"].encode():
        raise OSError(f"{place['uri']} is another place here than where the job is submitted")
    return {"took_s": round(time.monotonic() - begin, 3)}


def reads(request: Mapping[str, Any]) -> dict[str, Any]:
    """Read the documents that the job starts from."""
    for uri in request["reads"]:
        place, _, name = uri.rpartition("/")
        _store(place, request).get(name)
    return {"count": len(request["reads"])}


class _Folder:
    def __init__(self, folder: str) -> None:
        self._folder = Path(folder.removeprefix("file://"))

    def put(self, key: str, data: bytes) -> None:
        target = self._folder / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def get(self, key: str) -> bytes:
        return (self._folder / key).read_bytes()

    def delete(self, key: str) -> None:
        (self._folder / key).unlink(missing_ok=True)


class _Bucket:
    def __init__(self, uri: str, storage: Mapping[str, Any], secrets: Mapping[str, str]) -> None:
        import boto3
        from botocore.config import Config

        endpoint, region = storage.get("endpoint_url"), storage.get("region")
        settings = Config(
            connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 2},
            request_checksum_calculation="when_required", response_checksum_validation="when_required",
            s3={"addressing_style": "path"} if endpoint else {},
        )  # fmt: skip
        self._client = boto3.session.Session().client(
            "s3", endpoint_url=endpoint, region_name=region or ("us-east-1" if endpoint else None), config=settings,
            aws_access_key_id=secrets.get("AWS_ACCESS_KEY_ID"), aws_session_token=secrets.get("AWS_SESSION_TOKEN"),
            aws_secret_access_key=secrets.get("AWS_SECRET_ACCESS_KEY"),
        )  # fmt: skip
        self._bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data, IfNoneMatch="*")

    def get(self, key: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)["Body"].read()
        return data

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)


def _store(uri: str, request: Mapping[str, Any]) -> _Folder | _Bucket:
    if uri.startswith("s3://"):
        return _Bucket(uri, request.get("storage", {}), request.get("secrets", {}))
    return _Folder(uri)


def mlflow(request: Mapping[str, Any]) -> dict[str, Any]:
    """Ask MLflow for the experiment, make it if it is not there, and write a tag to it."""
    place = request["mlflow"]
    found = _ask(request, "GET", f"experiments/get-by-name?experiment_name={_quoted(place['experiment'])}")
    if found is None:
        made = _ask(request, "POST", "experiments/create", {"name": place["experiment"]}) or {}
        number = made["experiment_id"]
    else:
        number = found["experiment"]["experiment_id"]
    tag = {
        "experiment_id": number,
        "key": "mxdist.preflight",
        "value": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    _ask(request, "POST", "experiments/set-experiment-tag", tag)
    return {"experiment_id": number}


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="")


def _ask(request: Mapping[str, Any], method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return MLflow's answer; None if there is no such thing."""
    import base64
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    secrets, headers = request.get("secrets", {}), {"Content-Type": "application/json"}
    if secrets.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{secrets['MLFLOW_TRACKING_USERNAME']}:{secrets.get('MLFLOW_TRACKING_PASSWORD', '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    elif secrets.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {secrets['MLFLOW_TRACKING_TOKEN']}"
    url = f"{request['mlflow']['uri'].rstrip('/')}/api/2.0/mlflow/{path}"
    data = None if body is None else json.dumps(body).encode()
    try:
        asked = Request(url, data, headers, method=method)  # noqa: S310  # the job's own tracking.uri
        with urlopen(asked, timeout=MLFLOW_S) as answer:  # noqa: S310
            return json.loads(answer.read() or b"{}")
    except HTTPError as error:
        if error.code == 404 and method == "GET":
            return None
        raise OSError(
            f"MLflow answers {error.code} {error.reason}: {error.read(200).decode(errors='replace')}"
        ) from None
