"""The code of a job: this package and the user's own, as bytes with one digest.

The node side runs from the bundle, never from the site-packages of the control side, and never from files that
somebody may be editing while the job waits for its restart.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import mxdist
from mxdist.errors import Problem, SpecError
from mxdist.launch.plan import USER_FOLDER, user_file
from mxdist.spec import EvaluationJob, TrainingJob

_CODE = {".py"}
_CONFIG = {".json", ".yaml", ".yml", ".toml", ".cfg", ".ini"}
_CONFIG_MAX_BYTES = 1 << 20
_MAX_FILES = 2_000
_MAX_BYTES = 32 << 20
_SKIP = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


class Bundle:
    """The files of a job by their path inside the bundle.

    :param files: the contents by path, or what returns them: it is then asked once, when they are first needed.
    """

    def __init__(self, files: Mapping[str, bytes] | Callable[[], Mapping[str, bytes]]) -> None:
        self._source = files

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The contents by path."""
        return self._source() if callable(self._source) else self._source

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over paths and contents."""
        return _digest(self.files)

    @property
    def user_digest(self) -> str:
        """SHA-256 (hex) over the user's own Python alone.

        Settings beside it do not count: a script may write such files where it lies, and is still the same code.
        """
        files = self.files.items()
        return _digest({path: data for path, data in files if path.startswith(f"{USER_FOLDER}/") and _is_code(path)})

    def write(self, folder: Path) -> None:
        """Make ``folder`` with these files; it appears complete or not at all, and one that is there stays.

        What earlier calls left half done, because they failed or were killed, is removed.
        """
        partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        try:
            if not folder.is_dir():
                self._write(partial)
                partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another one made it just now, and swept ours away
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        for left in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _write(self, partial: Path) -> None:
        for path, data in self.files.items():
            target = partial / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def collect_later(job: TrainingJob | EvaluationJob) -> Bundle:
    """Return the bundle of ``job``; its files are read when they are first needed, which may be never.

    Whatever needs them raises what ``collect`` raises.
    """
    return Bundle(lambda: collect(job).files)


def collect(job: TrainingJob | EvaluationJob) -> Bundle:
    """Return the bundle of ``job``.

    :raises SpecError: the script or recipe is not there, or has too much around it.
    """
    package = Path(mxdist.__file__).parent
    files = {f"mxdist/{path.relative_to(package).as_posix()}": path.read_bytes() for path in _walk(package, _CODE)}
    field, main = user_file(job)
    if main is not None:
        files.update(_user_files(field, main))
    return Bundle(files)


def _digest(files: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for path, data in sorted(files.items()):
        total.update(f"{path}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest()


def _is_code(path: str) -> bool:
    """Whether a bundled file is code: Python, or a script without a suffix that is known as settings."""
    return Path(path).suffix not in _CONFIG


def _user_files(field: str, main: Path) -> Iterator[tuple[str, bytes]]:
    if not main.is_file():
        problem = f"{main} is a folder; name the file in it" if main.is_dir() else f"there is no file {main}"
        raise SpecError("The job", [Problem(field, problem)])
    yield f"{USER_FOLDER}/{main.name}", main.read_bytes()
    count, size_bytes = 0, 0
    for path in _walk(main.parent, _CODE | _CONFIG):
        size = path.stat().st_size
        if path.suffix in _CONFIG and size > _CONFIG_MAX_BYTES:
            continue
        count, size_bytes = count + 1, size_bytes + size
        if count > _MAX_FILES or size_bytes > _MAX_BYTES:
            most = f"{_MAX_FILES} files or {_MAX_BYTES >> 20} MiB of code"
            problem = f"{main.parent} holds more than {most} beside {main.name}; give it a folder of its own"
            raise SpecError("The job", [Problem(field, problem)])
        yield f"{USER_FOLDER}/{path.relative_to(main.parent).as_posix()}", path.read_bytes()


def _walk(folder: Path, suffixes: set[str]) -> Iterator[Path]:
    """Yield the code files below ``folder``, in order; a subfolder counts only when it holds Python of its own."""
    for root, folders, names in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(name for name in folders if _enter(here / name))
        if here != folder and not any(name.endswith(".py") for name in names):
            continue
        for name in sorted(names):
            if Path(name).suffix in suffixes and not name.startswith(".") and (here / name).is_file():
                yield here / name


def _enter(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in _SKIP or folder.is_symlink():
        return False
    scratch = folder / "code/mxdist/__init__.py"  # of an attempt, which holds a bundle itself
    return not any(os.path.exists(file) for file in (scratch, folder / "pyvenv.cfg"))  # even if it may not be entered
