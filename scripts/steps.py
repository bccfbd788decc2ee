"""Long steps that say what they do, how far they are and how long they took.

Standard library only, and for any Python from 3.9: it runs before the environments exist.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_PLAIN_EVERY_S = 20.0


class StepFailed(Exception):
    """A step of the set-up failed. The text says which, why, and where the whole log is."""


def duration_text(seconds: float) -> str:
    """Return ``7 s`` or ``2 min 05 s``."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60:02d} s"


class Steps:
    """The steps of one command, in order, with their durations."""

    def __init__(self) -> None:
        self.durations: list[tuple[str, float]] = []

    @contextmanager
    def step(self, title: str, progress: Callable[[], str] = str) -> Iterator[None]:
        """Announce a step, show that it goes on, and note how long it took."""
        begin = time.monotonic()
        done = threading.Event()
        ticker = threading.Thread(target=_tick, args=(title, progress, begin, done), daemon=True)
        ticker.start()
        try:
            yield
        except BaseException:
            done.set()
            ticker.join()
            _line(f"  {title} failed after {duration_text(time.monotonic() - begin)}")
            raise
        done.set()
        ticker.join()
        took = time.monotonic() - begin
        self.durations.append((title, took))
        _line(f"  {title}: {duration_text(took)}")

    def table(self) -> str:
        """Return where the time went."""
        width = max((len(title) for title, _ in self.durations), default=0)
        lines = [f"  {title:<{width}}  {duration_text(took):>12}" for title, took in self.durations]
        return "\n".join([*lines, f"  {'together':<{width}}  {duration_text(sum(t for _, t in self.durations)):>12}"])


def _tick(title: str, progress: Callable[[], str], begin: float, done: threading.Event) -> None:
    terminal = sys.stdout.isatty()
    if not terminal:
        _line(f"  {title} ...")
    while not done.wait(0.5 if terminal else _PLAIN_EVERY_S):
        text = f"  {title}: {duration_text(time.monotonic() - begin)} {progress()}".rstrip()
        if terminal:
            sys.stdout.write(f"\r\033[K{text[: _columns() - 1]}")
            sys.stdout.flush()
        else:
            _line(text)


def _columns() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 80


def _line(text: str) -> None:
    print(f"\r\033[K{text}" if sys.stdout.isatty() else text, flush=True)


def run(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> None:
    """Run a command with its output in a log.

    :raises StepFailed: it ended with an exit code other than 0, or does not exist.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        print(f"$ {' '.join(command)}", file=output, flush=True)
        try:
            code = subprocess.call(
                list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=folder
            )
        except OSError as error:
            raise StepFailed(f"cannot run {command[0]}: {error}") from None
    if code:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise StepFailed(f"{Path(command[0]).name} ended with exit code {code}; the end of {log}:\n{end}")
