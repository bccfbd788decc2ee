"""An Airflow home whose DAGs a test can run."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxdist.store import Store
from support.places import REPOSITORY, control_bin

MARK = "MXDIST-RESULT "


@dataclass(frozen=True)
class Ended:
    """How a DAG run ended.

    :param results: what each task returned.
    :param xcoms: everything each task pushed.
    """

    state: str
    run_id: str
    tasks: dict[str, str]
    xcoms: dict[str, dict[str, Any]]
    output: str

    @property
    def results(self) -> dict[str, Any]:
        return {task: values.get("return_value") for task, values in self.xcoms.items()}


@dataclass(frozen=True)
class Airflow:
    """A home for Airflow, and the environment its processes get."""

    environment: dict[str, str] = field(repr=False)
    runs: Store
    mlflow_url: str

    def run(self, dag: str, *, conf: dict[str, Any] | None = None, file: Path | None = None) -> Ended:
        """Run a DAG of ``dags/`` to its end in one process."""
        path = file or REPOSITORY / "dags" / f"{dag}.py"
        program = Path(__file__).parent / "run_dag.py"
        command = [str(control_bin() / "python"), str(program), str(path), dag, json.dumps(conf or {})]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=560)
        output = done.stdout + done.stderr
        found = [line.partition(MARK)[2] for line in done.stdout.splitlines() if line.startswith(MARK)]
        assert found, output[-8000:]
        return Ended(**json.loads(found[-1]), output=output)
