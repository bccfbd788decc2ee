"""The example DAGs: fast to parse without the heavy libraries, and with forms that refuse nonsense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DAGS = Path(__file__).parents[3] / "dags"
PROGRAM = """
import importlib.util, json, sys, time

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"mxnet", "horovod", "mlflow", "boto3", "botocore", "obstore", "numpy", "pandas"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from airflow.sdk import DAG, Param, CronDataIntervalTimetable, BaseOperator, BaseOperatorLink  # Airflow's own time
from airflow.sdk.bases.hook import BaseHook
spec = importlib.util.spec_from_file_location("a_dag_file", sys.argv[1])
before = time.process_time()
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
took = time.process_time() - before
dag = next(value for value in vars(module).values() if isinstance(value, DAG)) if False else None
print(json.dumps({"took": took}))
"""


@pytest.mark.parametrize("path", sorted(DAGS.glob("*.py")), ids=lambda path: path.stem)
def test_parses_fast_with_nothing_heavy_installed(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    # Processor time, so that a busy machine does not count.
    assert json.loads(done.stdout.splitlines()[-1])["took"] < 1.0


@pytest.mark.parametrize("path", sorted(DAGS.glob("*.py")), ids=lambda path: path.stem)
def test_is_no_longer_than_a_page(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 110


def load(name: str) -> Any:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(dag_folder=str(DAGS / f"{name}.py"))
    assert not bag.import_errors
    return bag.dags[name]
