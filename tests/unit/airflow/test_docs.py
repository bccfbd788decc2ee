"""What README and docs say is what the code does: examples, fields, names, numbers, links."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import BaseOperator

from mxdist.cli.commands import _parser
from mxdist.cli.follow import exit_code
from mxdist.cli.jobfile import read_job
from mxdist.errors import MxdistError, SpecError
from mxdist.hooks.cluster import AwsExtras, ClusterSettings
from mxdist.hooks.mlflow import MlflowExtras
from mxdist.hooks.ssh import SlurmExtras, SshExtras
from mxdist.launch.plan import RUNTIME_NAMES, SECRET_NAMES
from mxdist.operators.base import JobOperator
from mxdist.operators.evaluate import EvaluateModelOperator
from mxdist.operators.preflight import PreflightOperator
from mxdist.operators.promote import PromoteModelOperator
from mxdist.operators.reconcile import ReconcileJobsOperator
from mxdist.operators.stage import StageDatasetOperator
from mxdist.operators.train import DistributedTrainOperator, FineTuneOperator
from mxdist.provider import get_provider_info
from mxdist.runtime import exit_codes, logs
from mxdist.runtime.worker import Worker
from mxdist.spec import JobState, parse_job
from mxdist.tracking.runs import STATUS
from support import job_table
from support.pages import PAGES, REPOSITORY, Example, examples

OPERATORS = [
    PreflightOperator,
    StageDatasetOperator,
    DistributedTrainOperator,
    FineTuneOperator,
    EvaluateModelOperator,
    PromoteModelOperator,
    ReconcileJobsOperator,
]


def page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """Return what stands on a page under a heading."""
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,3}} |\Z)", page(name), re.M | re.S)
    assert found, f"{name} has no heading {heading!r}"
    return found[2]


def cells(text: str) -> set[str]:
    """Return every name in the first column of the tables in ``text``."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def ids(found: list[Example]) -> Any:
    return [pytest.param(one, id=one.place) for one in found]


@pytest.mark.parametrize("job", ids([one for one in examples("yaml") if "apiVersion:" not in one.text]))
def test_job_files_are_valid(job: Example) -> None:
    parse_job(yaml.safe_load(job.text))


@pytest.mark.parametrize("source", ids(examples("python")))
def test_python_compiles(source: Example) -> None:
    compile(source.text, source.place, "exec")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Airflow's own
@pytest.mark.parametrize("source", ids([one for one in examples("python") if "airflow.sdk" in one.text]))
def test_dags_can_be_read(source: Example, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(source.text)
    bag = DagBag(dag_folder=str(tmp_path))
    assert bag.import_errors == {}
    (dag,) = bag.dags.values()
    assert {type(task) for task in dag.tasks} <= set(OPERATORS)


def command_lines() -> list[Any]:
    shown = [(one.place, line) for one in examples("console") for line in one.text.splitlines()]
    shown = [(place, line.partition("#")[0].removeprefix("$ ").strip()) for place, line in shown]
    return [pytest.param(line, id=f"{place}-{line[:30]}") for place, line in shown if line]


@pytest.mark.parametrize("line", command_lines())
def test_commands_exist(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])
    if words[0] == "mxdist":
        _parser().parse_args(words[1:])
    elif words[0] == "make":
        assert words[1] in makefile()
    elif words[0] == "airflow":
        from airflow.cli.cli_parser import get_parser

        get_parser().parse_args(words[1:])
    elif words[0] == "sudo":
        assert words[1] == "apt-get"
    else:
        assert words[0] == "export"


def makefile() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", page("Makefile"), re.M))


def test_every_target_of_make_is_explained() -> None:
    assert cells(section("CONTRIBUTING.md", "Start")) == {f"make {name}" for name in makefile() - {"help"}}


def test_every_command_is_explained() -> None:
    (commands,) = [action for action in _parser()._actions if action.choices]
    explained = {name.split()[1] for name in cells(section("docs/running.md", "Commands"))}
    assert explained == set(commands.choices)


def test_table_of_fields_is_that_of_the_schema() -> None:
    assert job_table.written() == job_table.table()
    assert {"name", "optimizer.schedule.warmup_steps", "init.freeze", "models"} <= set(job_table.fields())


def test_message_of_a_wrong_job_is_as_shown(tmp_path: Path) -> None:
    (shown,) = [one.text for one in examples("text") if one.text.startswith("mxdist: job.yaml has")]
    path = tmp_path / "job.yaml"
    job = {"name": "x", "model": {"name": "mlp"}, "dataset": {"manifest_uri": "s3://b/m", "version": "0" * 64}}
    job |= {"optimizer": {"learning_rat": 1}, "batch_size": 63, "parallelism": {"world_size": 2}}
    path.write_text(yaml.safe_dump(job))
    with pytest.raises(SpecError) as raised:
        read_job(path)
    assert f"mxdist: {raised.value}\n".replace(str(path), "job.yaml") == shown


def parameters(operator: type[BaseOperator]) -> set[str]:
    return {name for name in inspect.signature(operator.__init__).parameters if name not in ("self", "kwargs")}


SHARED = "Every operator that runs a job"


def test_every_parameter_that_jobs_share_is_explained() -> None:
    assert cells(section("docs/airflow.md", SHARED)) == parameters(JobOperator)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_every_parameter_of_an_operator_is_explained(operator: type[BaseOperator]) -> None:
    assert cells(section("docs/airflow.md", operator.__name__)) == parameters(operator)


def test_every_field_of_a_connection_is_explained() -> None:
    text = section("docs/airflow.md", "Connections")
    assert cells(text) == set(ClusterSettings.model_fields)
    for name in (*AwsExtras.model_fields, *MlflowExtras.model_fields):
        assert f"`{name}`" in text
    clusters = section("docs/airflow.md", "Connections to clusters")
    assert cells(clusters) >= set(SshExtras.model_fields) >= set(SlurmExtras.model_fields)
    for connection in get_provider_info()["connection-types"]:
        assert f"type `{connection['connection-type']}`" in text + clusters


def test_every_state_is_in_the_table() -> None:
    rows = [line for line in section("docs/running.md", "States").splitlines() if line.startswith("| ")][1:]
    told = {(row.split("|")[3].split()[0].strip(",:"), row.split("|")[4].split()[0].strip(",:")) for row in rows}
    assert told == {(state.value, status) for state, status in STATUS.items()}
    assert {state for state in JobState if state.final} == set(STATUS)


def test_exit_codes_of_the_command_are_those_of_errors_and_states() -> None:
    text = section("docs/running.md", "Exit codes").partition("Of a rank")[0]
    told = {int(line.split("|")[1]) for line in text.splitlines() if re.match(r"\| \d", line)}
    raised = {kind.exit_code for kind in _tree(MxdistError)}
    assert told == raised | {exit_code(state) for state in STATUS}


def _tree(kind: type[MxdistError]) -> list[type[MxdistError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in _tree(below))]


def test_exit_codes_of_ranks_are_all_told() -> None:
    text = section("docs/running.md", "Exit codes").partition("Of a rank")[2]
    told = {int(line.split("|")[1]) for line in text.splitlines() if re.match(r"\| \d", line)}
    assert told == {value for name, value in vars(exit_codes).items() if name.isupper()}


def test_every_variable_and_secret_is_explained() -> None:
    variables = cells(section("docs/running.md", "Environment variables"))
    assert {name for name in RUNTIME_NAMES if name.startswith("MXDIST_")} <= variables
    secrets = section("docs/running.md", "Where secrets go")
    assert [name for name in SECRET_NAMES if f"`{name}`" not in secrets] == []


def test_bounds_of_the_log_are_those_of_the_code() -> None:
    text = " ".join(section("docs/running.md", "Logs").split())
    assert f"{logs.MAX_LINE_BYTES >> 10} KiB a line" in text
    assert f"{logs.RATE_BYTES_S >> 10} KiB a second after a burst of {logs.BURST_BYTES >> 20} MiB" in text
    assert f"{logs.TOTAL_BYTES >> 20} MiB in all" in text
    assert f"the last {logs.END_BYTES >> 10} KiB of each rank" in text


def test_every_member_of_the_worker_is_explained() -> None:
    text = section("docs/scripts.md", "The Worker")
    told = {name.split("(")[0].removeprefix("Worker.") for name in cells(text)}
    public = {name for name in vars(Worker) if not name.startswith("_")} - {"from_environment"}
    given = {"rank", "world_size", "local_rank"}
    assert public | given <= told | {"attempt_dir", "world_dir"}
    assert told <= public | given


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        there = (path.parent / file) if file else path
        assert there.exists(), target
        headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings}


def test_prose_is_not_wider_than_a_screen() -> None:
    wide = [
        f"{path.name}: {line[:40]}"
        for path in PAGES
        for line in path.read_text(encoding="utf-8").splitlines()
        if len(line) > 130 and not line.startswith(("|", "$ ", "  manifest_uri"))
    ]
    assert wide == []
