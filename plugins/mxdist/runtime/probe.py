"""The probe: looks at one node for ``mxdist preflight``, and says what it found.

It is sent as text, with ``nics.py`` and ``canaries.py``, to the Python of the node environment and needs nothing else
there: what it looks for may be what is missing. So it imports the standard library alone, and boto3 where it uses it.
It reads JSON lines from stdin and writes JSON lines, each after ``MARK``, to stdout:

in, first
    the request, see ``launch/preflight.py``: what is asked of the node.
out
    the report: versions, devices, addresses, disk, names, stores, MLflow.
in, then
    ``{"peers": [...], "names": [...]}``: where the probes of the other nodes listen, and names known only now.
out
    ``{"clock": ...}`` at once, then ``{"reached": {...}, "unresolved": [...]}``: whom of them this node can reach.

No check can hang it: each runs in a thread of its own, and what has not ended in time is told as such. Nothing stays.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TextIO

import mxdist.runtime.nics as nics
from mxdist.runtime.canaries import mlflow, reads, runs

MARK = "mxdist-probe "
"""What begins each line that is meant for us: a login shell may print other things."""

CHECK_S = 7.0
REACH_S = 3.0
DEEP_S = 90.0
_AGAIN_S = 0.5
_MXNETS = ("mxnet", *(f"mxnet-cu{version}" for version in (112, 110, 102, 101, 100, 92)))
_OTHERS = ("horovod", "numpy", "boto3", "mlflow-skinny", "pydantic")
_CUDA = {"nccl": ("nvidia-nccl-cu11", "nvidia-nccl-cu12"), "cuda": ("nvidia-cuda-runtime-cu11",)}
_DEEP = """
import json, sys, time
begin = time.monotonic()
import mxnet as mx
taken = time.monotonic() - begin
devices = [mx.gpu(n) for n in range(mx.context.num_gpus())] or [mx.cpu()]
for device in devices:
    layer = mx.gluon.nn.Dense(2, in_units=3)
    layer.initialize(ctx=device)
    assert layer(mx.nd.ones((1, 3), ctx=device)).asnumpy().shape == (1, 2)
print(json.dumps({"import_s": round(taken, 2), "devices": [str(device) for device in devices]}))
"""


def main(lines: Iterable[str] | None = None, out: TextIO | None = None) -> None:
    """Answer a request, then a list of peers."""
    said, out = iter(sys.stdin if lines is None else lines), sys.stdout if out is None else out
    request = json.loads(next(said, "{}"))
    os.environ.update(request.get("environment", {}))
    limit_s = DEEP_S if request.get("deep") else CHECK_S
    checks = {name: _bound(check, request) for name, check in CHECKS.items() if _asked(name, request)}
    report = together(checks, limit_s)
    listener = nics.Listener(one[1] for one in report.get("network", {}).get("usable", ()))
    host = {"host": node_name()}
    _say(out, {**host, "word": listener.word, "ports": listener.ports, **report})
    for line in said:  # then none: others may still knock until the submitter has heard all, and closes
        _say(out, {**host, "clock": time.time()})
        told = json.loads(line)
        unresolved = unresolvable(told.get("names", ()))
        _say(out, {**host, "reached": reach(told["peers"], listener.word), "unresolved": unresolved})
    listener.close()


def node_name() -> str:
    """Return what Slurm calls this node, if it started us; else its own name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def together(checks: Mapping[str, Callable[[], Any]], limit_s: float) -> dict[str, Any]:
    """Run all checks at once; return what each found, or ``{"error": ...}``."""
    found: dict[str, Any] = {}
    threads = {
        name: threading.Thread(target=_run, args=(found, name, check), daemon=True) for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    give_up = time.monotonic() + limit_s
    for name, thread in threads.items():
        thread.join(max(0.0, give_up - time.monotonic()))
        if thread.is_alive():
            found.setdefault(name, {"error": f"no answer in {limit_s:g} s"})
    return dict(found)


def _run(found: dict[str, Any], name: str, check: Callable[[], Any]) -> None:
    try:
        found.setdefault(name, check())
    except Exception as error:  # whatever it is, it is what was found
        found.setdefault(name, {"error": _one_line(error)})


def _bound(check: Callable[[Mapping[str, Any]], Any], request: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: check(request)


def _asked(name: str, request: Mapping[str, Any]) -> bool:
    """Whether a check that only some requests ask for is asked for. MLflow is the affair of the first node."""
    if name == "mlflow" and os.environ.get("SLURM_PROCID", "0") != "0":
        return False
    return name not in ("runs", "reads", "mlflow", "deep", "network") or bool(request.get(name))


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _say(out: TextIO, document: Mapping[str, Any]) -> None:
    out.write(f"{MARK}{json.dumps(document)}\n")
    out.flush()


def reach(peers: list[dict[str, Any]], own: str) -> dict[str, dict[str, str]]:
    """Return, for each peer and address of it, "" if that peer answered there, else what happened.

    :param peers: each with its host, the ports by address, and the word that only it knows.
    :param own: this node's word.
    """
    tries = [(peer, *at) for peer in peers if peer["word"] != own for at in peer["ports"].items()]
    with ThreadPoolExecutor(max(1, min(128, len(tries)))) as pool:
        told = list(pool.map(lambda one: _knock(one[1], one[2], one[0]["word"]), tries))
    found: dict[str, dict[str, str]] = {}
    for (peer, address, _), what in zip(tries, told, strict=True):
        found.setdefault(peer["host"], {})[address] = what
    return found


def _knock(address: str, port: int, word: str) -> str:
    """Return "" if the peer answers there; a refusal is believed only the second time."""
    told = _knock_once(address, port, word)
    if "refused" in told or "reset" in told:
        time.sleep(_AGAIN_S)
        told = _knock_once(address, port, word)
    return told


def _knock_once(address: str, port: int, word: str) -> str:
    try:
        with socket.create_connection((address, port), timeout=REACH_S) as peer:
            heard = b""
            while len(heard) < len(word) and (more := peer.recv(64)):
                heard += more
    except TimeoutError:
        return f"no answer in {REACH_S:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if heard == word.encode() else "another host answers there"


def versions(_: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of what must be the same on all nodes; what is not there is left out."""
    found = {"python": platform.python_version()}
    for name in _MXNETS:
        if version := _version(name):
            found |= {"mxnet": version, "build": name}
            break
    found |= {name: version for name in _OTHERS if (version := _version(name))}
    for part, names in _CUDA.items():
        versions_of_part = [version for name in names if (version := _version(name))]
        found |= {part: versions_of_part[0]} if versions_of_part else {}
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found["driver"] = next((word for word in driver.read_text().split() if word[:1].isdigit() and "." in word), "?")
    if "nccl" not in found and (libraries := _libraries("libnccl.so.2.*")):
        found["nccl"] = libraries[-1].partition(".so.")[2]
    return found


def _libraries(pattern: str) -> list[str]:
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib", "/usr/local/cuda/lib64")
    return sorted(path.name for folder in folders for path in Path(folder).glob(pattern))


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def gpus(_: Mapping[str, Any]) -> list[str]:
    """Return the names of the GPUs; none without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=CHECK_S - 1, check=False)
    if done.returncode:
        raise OSError(f"nvidia-smi failed: {(done.stdout + done.stderr).strip()}")
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def network(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the addresses that this node has, and those that ranks may use, as ``[device, address, prefix]``."""
    every = nics.addresses()
    usable = nics.candidates(every, request.get("interface"), request.get("host", ""))
    return {"every": [_plain(one) for one in every], "usable": [_plain(one) for one in usable]}


def _plain(one: nics.Address) -> list[Any]:
    return [one.device, one.address, one.prefix]


def names(request: Mapping[str, Any]) -> list[str]:
    """Return the names that this node cannot resolve: of the job's hosts, and its own."""
    return unresolvable([*request.get("names", ()), os.uname().nodename])


def unresolvable(wanted: Iterable[str]) -> list[str]:
    """Return those of some names that this node cannot resolve."""
    asked = list(dict.fromkeys(wanted))
    with ThreadPoolExecutor(max(1, min(64, len(asked)))) as pool:
        return [name for name, good in zip(asked, pool.map(_resolves, asked), strict=True) if not good]


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def disk(request: Mapping[str, Any]) -> dict[str, Any]:
    """Make the scratch folder, write into it, and return how much is free there."""
    folder = Path(request.get("workdir") or _default_workdir())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        canary = folder / f".preflight-{uuid.uuid4().hex}"
        try:
            with canary.open("wb") as file:
                file.write(os.urandom(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        finally:
            canary.unlink(missing_ok=True)
    except OSError as error:
        return {"folder": str(folder), "error": f"cannot write to {folder}: {error.strerror or error}"}
    return {"folder": str(folder), "free_bytes": shutil.disk_usage(folder).free}


def _default_workdir() -> str:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return os.environ.get("MXDIST_WORKDIR") or f"{state}/mxdist/jobs"


def deep(_: Mapping[str, Any]) -> Any:
    """Import MXNet and compute something on every device."""
    done = subprocess.run(
        [sys.executable, "-c", _DEEP], capture_output=True, text=True, timeout=DEEP_S - 5, check=False
    )
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


CHECKS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "versions": versions, "gpus": gpus, "network": network, "names": names, "disk": disk, "runs": runs,
    "reads": reads, "mlflow": mlflow, "deep": deep,
}  # fmt: skip
"""What a report holds, and who finds it out."""


def main_and_exit() -> NoReturn:
    """Answer, and end: a check that hangs must not keep the process on the node, nor a submitter that never closes."""
    threading.Timer(DEEP_S + CHECK_S + 60, os._exit, (1,)).start()
    main()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main_and_exit()
