"""The example DAGs: fast to parse without the heavy libraries, and with forms that refuse nonsense."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.decoders import decode_timetable
from airflow.serialization.encoders import encode_timetable
from airflow.timetables.base import TimeRestriction
from pendulum import DateTime
from unit.airflow.world import context_of

from mxdist.errors import SpecError
from mxdist.launch.plan import build_plan
from mxdist.operators.stage import data_as_of
from mxdist.operators.train import DistributedTrainOperator, FineTuneOperator
from mxdist.spec import TrainingJob

# Airflow's own: it reads .airflowignore with a name that pathspec no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

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
    assert len(path.read_text().splitlines()) <= 90


@pytest.fixture(scope="module")
def bag() -> DagBag:
    """The folder as Airflow's DAG processor reads it."""
    return DagBag(dag_folder=str(DAGS))


def test_folder_holds_these_dags_and_no_script(bag: DagBag) -> None:
    assert bag.import_errors == {}
    assert set(bag.dags) == {"mnist_retrain", "mxdist_reconcile", "own_script"}


def test_chain_is_the_one_that_is_described(bag: DagBag) -> None:
    dag = bag.dags["mnist_retrain"]
    order = ["stage", "pretrain", "transfer", "finetune", "evaluate", "promote"]
    tasks = dag.topological_sort()  # type: ignore[no-untyped-call]
    assert [task.task_id for task in tasks] == order
    for before, after in pairwise(order):
        assert before in dag.get_task(after).upstream_task_ids


def test_weekly_run_covers_the_week_that_ended(bag: DagBag) -> None:
    """Under either setting of create_cron_data_intervals: the timetable is named, not guessed from a cron text."""
    dag = bag.dags["mnist_retrain"]
    assert (dag.catchup, dag.max_active_runs) == (False, 1)
    timetable = decode_timetable(encode_timetable(dag.timetable))
    wednesday = DateTime(2026, 3, 11, 12, tzinfo=UTC)
    info = timetable.next_dagrun_info_v2(
        last_dagrun_info=None, restriction=TimeRestriction(earliest=wednesday, latest=None, catchup=True)
    )
    assert info is not None
    assert info.data_interval is not None
    assert (info.data_interval.start, info.data_interval.end) == (
        datetime(2026, 3, 16, 3, tzinfo=UTC),
        datetime(2026, 3, 23, 3, tzinfo=UTC),
    )
    assert info.run_after == info.data_interval.end


def test_reconciling_never_overlaps_and_never_catches_up(bag: DagBag) -> None:
    dag = bag.dags["mxdist_reconcile"]
    assert (dag.catchup, dag.max_active_runs) == (False, 1)
    (task,) = dag.tasks
    assert task.execution_timeout is not None


@pytest.mark.parametrize(
    "conf",
    [
        {"pretrain_epochs": 0},
        {"finetune_epochs": 2.5},
        {"transfer_rate": 0},
        {"finetune_rate": "fast"},
        {"batch_size": -1},
        {"world_size": 0},
        {"strategy": "telepathy"},
        {"margin": 1.5},
        {"seed": 2**31},
    ],
    ids=lambda conf: "-".join(conf),
)
def test_form_refuses_nonsense(bag: DagBag, conf: dict[str, Any]) -> None:
    params = bag.dags["mnist_retrain"].params
    with pytest.raises(ParamValidationError):
        validated(params, conf)


STAGED = {"manifest_uri": "s3://data/mnist5k/manifests/1.json", "version": "ab" * 32, "as_of": None}
TRAINED = {"model_uri": "s3://runs/pretrain/0000000001/model", "model": {"name": "lenet"}, "dataset": STAGED}


def jobs_of(dag: Any, conf: dict[str, Any]) -> list[TrainingJob]:
    """Return the jobs that a run of the DAG with this form would start, each read as its task reads it."""
    found = []
    for task in dag.tasks:
        if not isinstance(task, DistributedTrainOperator):
            continue
        operator = copy.copy(task)
        operator.dataset = STAGED if operator.dataset is not None else None
        if isinstance(operator, FineTuneOperator):
            operator.init_from = {**TRAINED, "labels": [5, 6, 7, 8, 9]}
        context = context_of(operator) | {"params": validated(dag.params, conf)}
        operator.render_template_fields(context)
        found.append(operator.build_job(context))
    return found


@pytest.fixture
def connected(runs_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both connections of the DAG; nobody answers."""
    mlflow = {"conn_type": "mxdist_mlflow", "host": "http://127.0.0.1:9"}
    monkeypatch.setenv("AIRFLOW_CONN_MXDIST_MLFLOW", json.dumps(mlflow))


@pytest.mark.usefixtures("connected")
def test_every_choice_of_the_form_is_a_job(bag: DagBag, runs_uri: str) -> None:
    dag = bag.dags["mnist_retrain"]
    choices = {name: dag.params.get_param(name).schema.get("enum") for name in dag.params}
    offered = [{name: value} for name, values in choices.items() for value in values or ()]
    assert {"strategy": "allreduce"} in offered
    for conf in [{}, *offered, *({**one, "world_size": 1} for one in offered)]:
        jobs = jobs_of(dag, conf)
        assert len(jobs) == 3
        for job in jobs:
            assert job.parallelism.strategy.value == conf.get("strategy", "allreduce")
            assert job.parallelism.world_size == conf.get("world_size", 2)
            build_plan(job, "key", runs_uri=runs_uri, python="python", workdir="/scratch", cores=(0, 1))
            # Without BatchNorm and dropout, which some strategies refuse, but not before the ranks have the network.
            assert job.model is not None
            assert (job.model.name, job.model.params) == ("lenet", {})


@pytest.mark.usefixtures("connected")
def test_a_form_that_contradicts_itself_is_refused_before_anything_starts(bag: DagBag) -> None:
    with pytest.raises(SpecError, match="batch_size: 64 is not divisible"):
        jobs_of(bag.dags["mnist_retrain"], {"world_size": 3})


def validated(params: Any, conf: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(params)
    merged.update(conf)
    return dict(merged.validate())


def test_form_explains_every_field_and_its_defaults_are_allowed(bag: DagBag) -> None:
    assert validated(bag.dags["mnist_retrain"].params, {})
    for dag in bag.dags.values():
        validated(dag.params, {})
        for name in dag.params:
            param = dag.params.get_param(name)
            assert param.description
            assert {"type", "enum"} & set(param.schema)


WEEK_END = DateTime(2026, 3, 9, 3, tzinfo=UTC)
THURSDAY = DateTime(2026, 3, 12, 9, tzinfo=UTC)


def run_of(dag: Any, kind: str) -> Any:
    """Return the context of a run of this kind, with the dates that Airflow gives it."""
    timetable = decode_timetable(encode_timetable(dag.timetable))
    logical_date, interval = None, None
    if kind == "scheduled":
        restriction = TimeRestriction(earliest=DateTime(2026, 3, 2, 3, tzinfo=UTC), latest=None, catchup=True)
        info = timetable.next_dagrun_info_v2(last_dagrun_info=None, restriction=restriction)
        assert info is not None
        interval = info.data_interval
        logical_date = interval.start
    elif kind == "form":  # its default is now
        interval, logical_date = timetable.infer_manual_data_interval(run_after=THURSDAY), THURSDAY
    dates = {"logical_date": logical_date, "data_interval_end": interval.end if interval else None}
    return {"dag_run": SimpleNamespace(run_after=THURSDAY, **dates)}


@pytest.mark.parametrize(
    ("kind", "as_of"),
    [
        pytest.param("scheduled", WEEK_END, id="scheduled or backfilled"),
        pytest.param("form", THURSDAY, id="started from the form"),
        pytest.param("asset", THURSDAY, id="started by an asset or without a date"),
    ],
)
def test_age_of_data_for_every_kind_of_run(bag: DagBag, kind: str, as_of: datetime) -> None:
    context = run_of(bag.dags["mnist_retrain"], kind)
    assert data_as_of(context) == as_of


def test_a_run_for_a_past_week_stages_data_of_that_week(bag: DagBag) -> None:
    """The API may name any logical date; then the interval is of that time, too."""
    timetable = decode_timetable(encode_timetable(bag.dags["mnist_retrain"].timetable))
    past = DateTime(2026, 2, 12, 9, tzinfo=UTC)
    end = timetable.infer_manual_data_interval(run_after=past).end
    context: Any = {"dag_run": SimpleNamespace(run_after=THURSDAY, logical_date=past, data_interval_end=end)}
    assert end < data_as_of(context) == past
