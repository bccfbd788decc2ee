"""The first thing of mxdist that runs on a host: it gets the code, and becomes what it was asked to be.

This file is self-contained: it is sent as text. Either a Python that was started with ``launch.summon.command`` reads
it from its standard input as a first frame, and the document as a second one; or a script holds its text, and calls
``begin`` with the document. A frame is its length in decimal, a newline, and that many bytes. Nothing secret is part of
a command.

The document is one JSON object::

    what          "agent": runs the ranks of this host for a supervisor elsewhere (mxdist.runtime.agent); answers go on
                  "supervisor": makes the scratch folder, starts mxdist.runtime.supervisor there; one answer
                  "life": is the supervisor with "pid" and "start_time" alive, what else of the job is; one answer
                  "end": ends every process of the job here, with "grace_s"; one answer
                  "probe": looks at the host for a preflight (mxdist.runtime.probe); one answer
    code          {"how": "bundle", "uri": "<runs_uri>/_code/<digest>.zip", "digest": "<sha256>"}: unpacked once a node
                  {"how": "shared", "folder": "/path"}: a folder that holds mxdist/, on a disk that this host sees
                  {"how": "image"}: this Python has mxdist installed. With "uri" and "digest" as well, "bundle" counts
                  for the user's code and mxdist alike
    python        the Python of the node environment; null: the one that runs this
    workdir       folder for scratch folders, code and datasets; null: $MXDIST_WORKDIR or ~/.local/state/mxdist/jobs
    runs_uri, job_key, attempt, token        of the attempt; the token is not secret, but belongs to one attempt
    storage       {"endpoint_url": ..., "region": ...}
    environment   {name: value}: allow-listed and not secret, added to what the host itself gives
    secrets       {name: value}: handed on in a 0600 file or a file without a name, never in a command
    link_timeout_s  how long agent and supervisor may hear nothing of each other

    supervisor:   "incarnation": number; "nonce": any word, stands in the claim that the launcher then looks for;
                  "foreground": true: stay in the foreground until the end (Slurm's batch step, a pod);
                  "again": how the nonces of claims begin that earlier runs of this very batch job have made
                  "hosts": names of the hosts in their order, or null where job or platform say them;
                  "here": the name of the host that this is, null: none of them;
                  "opener": how the other hosts are reached: see mxdist.runtime.openers
    agent:        "host": its name in the plan; "number": which host of the plan
    life:         "pid", "start_time"
    end:          "grace_s"; "spare": true: leave the supervisor itself alone

Answers, and everything else that goes the other way, are lines ``{"mxdist": "<kind>", ...}`` on standard output; other
lines are a login shell's chatter. Kinds of single answers: "answer" with what was asked for, "error" with
{"message", "hint", "retryable"}. The exit code is 0 after an answer, else 1.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import uuid
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MODULES = {
    "agent": "mxdist.runtime.agent",
    "supervisor": "mxdist.runtime.errands",
    "life": "mxdist.runtime.errands",
    "end": "mxdist.runtime.errands",
    "probe": "mxdist.runtime.probe",
}
_WIDTH = 10  # of an attempt's number in a folder's name: mxdist.store.sequence.WIDTH
_LISTING = ".mxdist-files.json"


class Refused(Exception):
    """This host cannot do what it was asked to; ``retryable`` says whether that may pass."""

    def __init__(self, message: str, *, hint: str = "", retryable: bool = False) -> None:
        super().__init__(message)
        self.hint, self.retryable = hint, retryable


def begin(document: dict[str, Any]) -> None:
    """Get the code, and become what the document asks for. Does not return."""
    try:
        workdir = workdir_of(document)
        code = get_code(document["code"], workdir, document)
        document = {**document, "workdir": str(workdir), "folder": str(prepare(document, workdir, code))}
        run(document, code)
    except Refused as error:
        refuse(str(error), hint=error.hint, retryable=error.retryable)
    except OSError as error:
        refuse(f"cannot prepare this host: {error}", hint="Check free space and permissions.", retryable=True)


def refuse(message: str, *, hint: str, retryable: bool) -> None:
    """Say why this host does not do what it was asked to, and end."""
    line = {"mxdist": "error", "message": message, "hint": hint, "retryable": retryable}
    os.write(1, json.dumps(line, separators=(",", ":")).encode() + b"\n")
    sys.exit(1)


def workdir_of(document: dict[str, Any]) -> Path:
    """Return the folder for everything that jobs leave on this host."""
    told = document.get("workdir") or os.environ.get("MXDIST_WORKDIR")
    if told:
        return Path(told).absolute()
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "mxdist" / "jobs"


def prepare(document: dict[str, Any], workdir: Path, code: Path | None) -> Path:
    """Return the scratch folder of the attempt on this host, made, with the code in it.

    An agent's folder bears the name of its host: the disk may be one that several hosts share.
    """
    if not document.get("job_key"):
        return workdir
    name = f"{document['attempt']:0{_WIDTH}d}"
    if document["what"] == "agent":
        name += f"@{document['number']}"
    folder = workdir / str(document["job_key"]) / name
    if document["what"] not in ("agent", "supervisor"):
        return folder
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    if document["what"] == "agent":  # for mxdist prune, should the agent be killed; it removes the folder itself
        told = {name: document.get(name) for name in ("runs_uri", "job_key", "attempt", "storage")}
        told["token"] = f"{document['token']}.{document['number']}"
        (folder / "attempt.json").write_text(json.dumps(told))
    if code is not None:
        partial = folder / f".code-{uuid.uuid4().hex}"
        partial.symlink_to(code)
        if (folder / "code").is_dir() and not (folder / "code").is_symlink():
            partial.unlink()  # a launcher on this host has written it
        else:
            partial.replace(folder / "code")
    return folder


def get_code(told: dict[str, Any], workdir: Path, document: dict[str, Any]) -> Path | None:
    """Return the folder that holds ``mxdist/``; None: this Python has it installed.

    :raises Refused: it is not there, or is not what its digest says.
    """
    if told.get("digest") and told.get("uri"):
        return unpack(told["uri"], told["digest"], workdir / "code", document)
    if told["how"] == "image":
        return None
    folder = Path(told["folder"])
    if not (folder / "mxdist" / "__init__.py").is_file():
        raise Refused(f"{folder} holds no mxdist.", hint="Is the shared disk mounted on this host?")
    return folder


def unpack(uri: str, digest: str, folder: Path, document: dict[str, Any]) -> Path:
    """Return the folder of the code with this digest: got once on this host, and verified each time."""
    target = folder / digest
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / f"{digest}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not intact(target, digest):
            files = open_zip(read(uri, document), digest, uri)
            partial = Path(tempfile.mkdtemp(prefix=f".{digest[:12]}-", dir=folder))
            for path, data in files.items():
                place = partial / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data)
            (partial / _LISTING).write_text(json.dumps(sorted(files)))
            if target.exists():
                target.rename(folder / f".{digest[:12]}-{uuid.uuid4().hex}.spoilt")
            partial.rename(target)
            for left in folder.glob(f".{digest[:12]}-*"):
                shutil.rmtree(left, ignore_errors=True)
        os.utime(target)  # when it was last used: see mxdist.launch.scratch
    return target


def intact(folder: Path, digest: str) -> bool:
    """Return whether a folder still holds the code with this digest; other files in it do not count."""
    try:
        names = json.loads((folder / _LISTING).read_text())
        return digest_of({name: (folder / name).read_bytes() for name in names}) == digest
    except (OSError, ValueError):
        return False


def digest_of(files: dict[str, bytes]) -> str:
    """Return SHA-256 (hex) over paths and contents: as mxdist.launch.bundle has it."""
    total = hashlib.sha256()
    for path, data in sorted(files.items()):
        total.update(f"{path}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest()


def open_zip(data: bytes, digest: str, uri: str) -> dict[str, bytes]:
    """Return the files of a bundle by their path.

    :raises Refused: they are not what the digest says, or would leave their folder.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as bundle:
            files = {name: bundle.read(name) for name in bundle.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
        raise Refused(f"the code at {uri} is damaged: {error}", retryable=True) from None
    if any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise Refused(f"the code at {uri} would leave its folder.")
    found = digest_of(files)
    if found != digest:
        raise Refused(
            f"the code at {uri} has the digest {found[:16]}, not {digest[:16]}.", hint="Submit the job again."
        )
    return files


def read(uri: str, document: dict[str, Any]) -> bytes:
    """Return an object of the run store.

    :raises Refused: it is not there, or the store does not answer.
    """
    parts = urlsplit(uri)
    if parts.scheme != "s3":
        path = Path(unquote(parts.path) if parts.scheme else uri)
        try:
            return path.read_bytes()
        except OSError as error:
            hint = "A run store in a folder must be on a disk that every host sees; else use s3://."
            raise Refused(f"cannot read {path}: {error.strerror}", hint=hint) from None
    try:
        return read_s3(parts.netloc, parts.path.lstrip("/"), document)
    except ImportError:
        raise Refused("this Python has no boto3.", hint="Install it in the node environment.") from None
    except Exception as error:  # boto3 has many
        raise Refused(f"cannot read {uri}: {error}", hint="Can this host reach S3?", retryable=True) from None


def read_s3(bucket: str, key: str, document: dict[str, Any]) -> bytes:
    """Return an object of S3."""
    import boto3
    from botocore.config import Config

    secrets = {**os.environ, **(document.get("environment") or {}), **(document.get("secrets") or {})}
    storage = document.get("storage") or {}
    endpoint, region = storage.get("endpoint_url") or secrets.get("AWS_ENDPOINT_URL"), storage.get("region")
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=region or secrets.get("AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else None),
        aws_access_key_id=secrets.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=secrets.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=secrets.get("AWS_SESSION_TOKEN"),
        config=Config(
            connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 5},
            response_checksum_validation="when_required", s3={"addressing_style": "path"} if endpoint else {},
        ),
    )  # fmt: skip
    return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())


def run(document: dict[str, Any], code: Path | None) -> None:
    """Become the module that does what was asked; the document goes along in a file that has no name."""
    python = document.get("python") or sys.executable
    file = os.memfd_create("mxdist-document", 0)
    os.write(file, json.dumps(document).encode())
    os.lseek(file, 0, os.SEEK_SET)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if code is not None:
        environment["PYTHONPATH"] = str(code)
    if document.get("token"):
        number = f".{document['number']}" if document["what"] == "agent" else ""
        environment["MXDIST_TOKEN"] = f"{document['token']}{number}"
        if document["what"] in ("life", "end"):
            del environment["MXDIST_TOKEN"]  # who looks for the job's processes is none of them
    with contextlib.suppress(OSError):
        os.chdir(document["folder"])
    module = MODULES[document["what"]]
    os.execve(python, [python, "-m", module, document["what"], "--document", str(file)], environment)


def first_document() -> dict[str, Any]:
    """Return the document: the next frame on standard input."""
    file = open(0, "rb", 0, closefd=False)  # noqa: SIM115  # unbuffered: what follows is for whoever runs then
    length = int(file.readline() or 0)
    data = b""
    while len(data) < length:
        more = file.read(length - len(data))
        if not more:
            sys.exit(75)
        data += more
    return dict(json.loads(data))


if __name__ == "__main__":
    begin(first_document())
