"""Build Horovod for the mxnet of a requirements file, with two faults of it mended, once per machine.

For mxnet it meets over Gloo, and over MPI as well if asked; for mxnet-cu112 over Gloo, MPI and NCCL, which needs CUDA's
compiler and NCCL. A Horovod with MPI is linked to Open MPI's library and cannot be imported on a machine without it, so
it is a wheel of its own.

As published, ``gloo_controller.cc`` reserves room for the list of ranks but never sizes it, so under Gloo the
stall inspector sees no ranks and a hung world is never reported. And ``mpi_ops.cc`` lends a broadcast's name to a
function that reads it for its trace after handing the broadcast over: if that is carried out first, the name is freed
by then, and the rank may die of SIGSEGV. That is rare, and happens on busy machines.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from steps import StepFailed, run

VERSION = "0.28.1"
_SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_BUILD = {
    "HOROVOD_WITH_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
}
_BUILD_MPI = {
    **{name: value for name, value in _BUILD.items() if name != "HOROVOD_WITHOUT_MPI"},
    "HOROVOD_WITH_MPI": "1",
}
_BUILD_CUDA = {
    "HOROVOD_WITH_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_GPU_OPERATIONS": "NCCL",
    "HOROVOD_NCCL_LINK": "SHARED",
    "HOROVOD_BUILD_CUDA_CC_LIST": "50,60,70,80,86",  # those that mxnet-cu112 has code for
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
}


@dataclass(frozen=True)
class Mend:
    """A change to one file of the source: what stands there so many times, and what should."""

    file: str
    wrong: str
    right: str
    times: int


MENDS = (
    Mend("common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_);", "global_ranks_.resize(size_);", 1),
    Mend("mxnet/mpi_ops.cc", "ops_param->op_names[0],", "std::string(ops_param->op_names[0]),", 4),
)


def cache_root() -> Path:
    """Return where wheels are kept between checkouts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mxdist/wheels"


def cache_key(requirements: Path, *, mpi: bool = False) -> str:
    """Return what the wheel depends on: versions, the mends, Python, the machine, the compiler, and MPI's library."""
    mxnet, options = _mxnet(requirements), str(build_options(requirements, mpi=mpi))
    mends = [mend.right for mend in MENDS]
    parts = [VERSION, *mends, options, mxnet, "cp311", platform.machine(), _compiler(), *([open_mpi()] if mpi else [])]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"horovod-{VERSION}-{digest[:16]}"


def build_options(requirements: Path, *, mpi: bool = False) -> dict[str, str]:
    """Return the variables that say what is built, by the mxnet of the requirements.

    :param mpi: over MPI as well, where that is not built anyway.
    """
    if _mxnet(requirements).startswith("mxnet-cu"):
        return dict(_BUILD_CUDA)
    return dict(_BUILD_MPI if mpi else _BUILD)


def open_mpi() -> str:
    """Return the version of Open MPI that programs are compiled for; "" if there is none."""
    try:
        answer = subprocess.run(["mpicxx", "--showme:version"], capture_output=True, text=True)
    except OSError:
        return ""
    found = re.search(r"Open MPI (\S+)", answer.stdout)
    return found[1] if found else ""


def _mxnet(requirements: Path) -> str:
    found = re.search(r"^mxnet\S*==\S+", requirements.read_text(), re.MULTILINE)
    return found.group() if found else ""


def _compiler() -> str:
    """Return the compiler's version."""
    try:
        version = subprocess.run([os.environ.get("CXX", "g++"), "-dumpfullversion"], capture_output=True, text=True)
    except OSError:
        return "none"
    return version.stdout.strip()


def cached_wheel(requirements: Path, *, mpi: bool = False) -> Path | None:
    """Return the wheel if it has been built before."""
    return next(iter((cache_root() / cache_key(requirements, mpi=mpi)).glob("*.whl")), None)


def build_wheel(uv: str, python: str, requirements: Path, log: Path, *, mpi: bool = False) -> Path:
    """Return the wheel, building it unless another process just did.

    :param requirements: pinned, with mxnet among them; ``requirements-horovod.txt`` lies beside it.
    :param mpi: with MPI as well as Gloo; needs Open MPI's compiler.
    """
    home = cache_root()
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home / ".lock"):
        done = cached_wheel(requirements, mpi=mpi)
        if done is not None:
            return done
        # Not in the tree: a path with a space in it breaks the build of Gloo.
        with tempfile.TemporaryDirectory(prefix="build-", dir=home) as scratch:
            built = _build(uv, python, requirements, Path(scratch), log, build_options(requirements, mpi=mpi))
            target = home / cache_key(requirements, mpi=mpi)
            staging = Path(tempfile.mkdtemp(prefix="done-", dir=home))
            shutil.move(str(built), staging / built.name)
            shutil.rmtree(target, ignore_errors=True)
            staging.rename(target)
        return target / built.name


def _build(uv: str, python: str, requirements: Path, scratch: Path, log: Path, options: Mapping[str, str]) -> Path:
    venv = scratch / "venv"
    run([uv, "venv", "-q", "--python", python, str(venv)], log=log)
    files = ["-r", str(requirements), "-r", str(requirements.with_name("requirements-horovod.txt"))]
    run([uv, "pip", "install", "-q", "--python", str(venv / "bin/python"), *files], log=log)
    source = _mended_source(venv / "bin/python", scratch, log)
    environment = {**os.environ, **options, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    environment["MAKEFLAGS"] = f"-j{len(os.sched_getaffinity(0))}"
    wheel = [str(venv / "bin/python"), "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    run([*wheel, "-w", str(scratch / "wheels"), str(source)], log=log, environment=environment)
    return next((scratch / "wheels").glob("horovod-*.whl"))


def _mended_source(python: Path, scratch: Path, log: Path) -> Path:
    download = [str(python), "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "horovod"]
    run([*download, "--no-build-isolation", "-d", str(scratch), f"horovod=={VERSION}"], log=log)
    sdist = scratch / f"horovod-{VERSION}.tar.gz"
    if hashlib.sha256(sdist.read_bytes()).hexdigest() != _SDIST_SHA256:
        raise StepFailed(f"the source of horovod {VERSION} is not the one that our mends were written for")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch)  # noqa: S202 - its digest is pinned
    source = scratch / f"horovod-{VERSION}"
    for mend in MENDS:
        file = source / "horovod" / mend.file
        text = file.read_text()
        if text.count(mend.wrong) != mend.times:
            raise StepFailed(f"{mend.file} of horovod {VERSION} does not hold what to mend {mend.times} times")
        file.write_text(text.replace(mend.wrong, mend.right))
    return source


def build_progress(log: Path) -> str:
    """Return how far the compiler is, from make's own percentages."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20000))
            found = re.findall(rb"\[ *(\d+)%\]", file.read())
    except OSError:
        return ""
    return f"({int(found[-1])} % compiled)" if found else ""


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
