"""Build a kube-apiserver for the tests from Debian's source package, once per machine: kube_apiserver.py [--where]

As packaged it crashes on the first custom resource (reflect2 1.0.1 under Go 1.19): Debian's newer reflect2 replaces
the copy in its source.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from steps import StepFailed, Steps, run

REPOSITORY = Path(__file__).resolve().parents[1]
VERSION = "1.20.2"
_RECIPE = "go1.19-reflect2"  # changes when the way of building does
PACKAGES = ("golang-1.19-go", "golang-github-modern-go-reflect2-dev", "dpkg-dev", "rsync")
_GO = Path("/usr/lib/go-1.19/bin")
_REFLECT2 = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")
_SOURCES = Path("/etc/apt")


def main() -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--where", action="store_true", help="only say where it is; exit code 1 if it is not built yet")
    parser.add_argument("--packages", action="store_true", help="only name the packages that the build needs")
    wanted = parser.parse_args()
    if wanted.packages:
        print(*PACKAGES)
        return 0
    if wanted.where:
        print(cached())
        return 0 if cached().exists() else 1
    try:
        print(build(REPOSITORY / ".mxdist/kube-apiserver.log"))
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def cached() -> Path:
    """Return where the program is kept between checkouts; it may not be there yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / f"mxdist/kube/kube-apiserver-{VERSION}-{platform.machine()}-{_RECIPE}"


def build(log: Path) -> Path:
    """Return the program, building it unless it is there. It takes about ten minutes of two cores.

    :raises StepFailed: packages that the build needs are missing, or it failed.
    """
    target = cached()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _check_packages()
            with Steps().step("Build kube-apiserver"), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                built = _build(Path(scratch), log)
                built.rename(target)
    return target


def _check_packages() -> None:
    needed = {_GO / "go": PACKAGES[0], _REFLECT2: PACKAGES[1]}
    missing = [package for path, package in needed.items() if not path.exists()]
    missing += [
        package for program, package in (("dpkg-source", "dpkg-dev"), ("rsync",) * 2) if not shutil.which(program)
    ]
    if missing:
        raise StepFailed(f"to build kube-apiserver, install: {' '.join(missing)}")


def _build(scratch: Path, log: Path) -> Path:
    source = _source(scratch, log)
    vendored = source / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(_REFLECT2, vendored)
    gopath = source / ".go/src/k8s.io"
    gopath.mkdir(parents=True)
    (gopath / "kubernetes").symlink_to(source)
    home = scratch / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{_GO}:{os.environ['PATH']}",
        "HOME": str(home),
        "GOPATH": str(source / ".go"),
        "GOCACHE": str(scratch / "gocache"),
        "CGO_ENABLED": "0",
        "GOPROXY": "off",
        "GOFLAGS": "-mod=vendor",
    }
    version = {"VERSION": f"v{VERSION}", "COMMIT": "debian", "TREE_STATE": "archive", "MAJOR": "1", "MINOR": "20"}
    options = [f"KUBE_GIT_{name}={value}" for name, value in version.items()]
    command = ["make", "WHAT=cmd/kube-apiserver", "GOLDFLAGS=-s -w", *options]
    # Its makefiles end with an error after the program is built (a step for other architectures).
    failure = None
    try:
        run(command, log=log, environment=environment, folder=source)
    except StepFailed as error:
        failure = error
    built = next((path for path in (source / "_output").rglob("kube-apiserver") if path.is_file()), None)
    if built is None:
        raise failure or StepFailed(f"the build of kube-apiserver made no program; see {log}")
    run([str(built), "--version"], log=log)
    _make_writable(scratch)
    return built


def _make_writable(folder: Path) -> None:
    """Go's caches are read-only; they could not be removed by anybody but root."""
    for root, folders, _ in os.walk(folder):
        for name in folders:
            path = Path(root, name)
            if not path.is_symlink():
                path.chmod(0o755)


def _source(scratch: Path, log: Path) -> Path:
    """Fetch and unpack the source with package lists of our own: the machine's apt settings stay as they are."""
    lists = scratch / "lists"
    (lists / "partial").mkdir(parents=True)
    sources = scratch / "debian.sources"
    sources.write_text(_source_entries())
    apt = ["apt-get", "-q", "-o", f"Dir::Etc::SourceList={sources}", "-o", "Dir::Etc::SourceParts=-"]
    apt += ["-o", f"Dir::State::Lists={lists}", "-o", "APT::Sandbox::User=root"]
    run([*apt, "update"], log=log)
    run([*apt, "source", "kubernetes"], log=log, folder=scratch)
    return next(path for path in scratch.glob("kubernetes-*") if path.is_dir())


def _source_entries() -> str:
    """Return the machine's own entries of its Debian release, as entries for source packages."""
    release = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    if release is None:
        raise StepFailed("kube-apiserver is built from Debian's source package; this system is not Debian")
    found = []
    for file in sorted(_SOURCES.glob("sources.list.d/*.sources")):
        for entry in re.split(r"\n\s*\n", file.read_text()):
            if re.search(rf"^Suites:.*\b{release[1]}( |$)", entry, re.MULTILINE):
                found.append(re.sub(r"^Types:.*$", "Types: deb-src", entry, flags=re.MULTILINE))
    for file in [_SOURCES / "sources.list", *sorted(_SOURCES.glob("sources.list.d/*.list"))]:
        lines = file.read_text().splitlines() if file.exists() else []
        found += [f"deb-src {line[4:]}" for line in lines if re.match(rf"deb .*\s{release[1]}\s", line)]
    if not found:
        raise StepFailed(f"no entry for {release[1]} in {_SOURCES}")
    return "\n\n".join(found) + "\n"


if __name__ == "__main__":
    sys.exit(main())
