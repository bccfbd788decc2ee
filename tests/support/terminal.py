"""The command line as a user has it: a folder, and the environment variables that README tells to set."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mxdist
from mxdist.store import Attempt, JobRun, Result, open_store

_GENEROUS_S = 480.0


@dataclass
class Terminal:
    """A terminal in a folder. Jobs run in the environment that runs the test.

    :param folder: the working directory; runs, jobs and data are kept in it.
    """

    folder: Path

    def mxdist(self, *arguments: str) -> str:
        """Run a command that must succeed; return what it printed."""
        environment = {
            **os.environ, "PYTHONPATH": str(Path(mxdist.__file__).parents[1]), "MXDIST_NODE_PYTHON": sys.executable,
            "MXDIST_RUNS_URI": str(self.folder / "runs"), "MXDIST_WORKDIR": str(self.folder / "jobs"),
            "MXDIST_DATA_URI": str(self.folder / "data"),
        }  # fmt: skip
        command = [sys.executable, "-m", "mxdist.cli", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=_GENEROUS_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def attempts(self) -> list[Attempt]:
        """Return the newest attempt of each job that was run."""
        store = open_store(str(self.folder / "runs"))
        found = [JobRun(store, entry.key.split("/")[1]).latest() for entry in store.list("_jobs/")]
        return [attempt for attempt in found if attempt is not None]

    def only_result(self) -> Result:
        """Return the result of the one job that was run."""
        (attempt,) = self.attempts()
        result = attempt.result()
        assert isinstance(result, Result)
        return result
