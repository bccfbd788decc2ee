"""The operator that looks at the hosts before a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from unit.airflow.world import context_of

from mxdist.operators.preflight import PreflightOperator
from support.places import node_python


@pytest.fixture
def make(runs_uri: str, tmp_path: Path) -> Any:
    """The operator, on this host."""

    def operator(**fields: Any) -> PreflightOperator:
        place = {"python": str(node_python()), **fields.pop("cluster", {})}
        return PreflightOperator(task_id="preflight", mlflow_conn_id=None, cluster=place, **fields)

    return operator


def test_ready_hosts_let_the_dag_go_on(make: Any, runs_uri: str) -> None:
    operator = make(world_size="2")
    assert operator.execute(context_of(operator)) == {"hosts": 1}


def test_problems_fail_the_task_with_the_table_and_a_retry_may_help(make: Any) -> None:
    operator = make(cluster={"workdir": "/proc/none"})
    with pytest.raises(AirflowException) as raised:
        operator.execute(context_of(operator))
    assert not isinstance(raised.value, AirflowFailException)
    assert "1 problem\n  127.0.0.1: disk: cannot write to /proc/none" in str(raised.value)
    assert str(raised.value).startswith("preflight of preflight: 1 local host\n\nhost ")


def test_dataset_that_a_host_cannot_read_is_a_problem(make: Any, tmp_path: Path) -> None:
    version = "0" * 64
    dataset = {"manifest_uri": f"{tmp_path}/data/set/manifests/{version}.json", "version": version, "as_of": "2026"}
    operator = make(dataset=dataset)
    with pytest.raises(AirflowException, match=r"127\.0\.0\.1: data: what the job starts from cannot be read"):
        operator.execute(context_of(operator))


def test_wrong_fields_fail_for_good(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = make(parallelism={"world_sise": 2})
    with pytest.raises(AirflowFailException, match="did you mean 'world_size'"):
        operator.execute(context_of(operator))


def test_hosts_of_the_connection_are_looked_at(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"hosts": "127.0.0.1 port=1", "private_key": "", "known_hosts": ""}
    monkeypatch.setenv("AIRFLOW_CONN_HOSTS", json.dumps({"conn_type": "mxdist_ssh", "extra": extra}))
    operator = make(cluster={"connection": "hosts"})
    with pytest.raises(AirflowException, match=r"127\.0\.0\.1: login: cannot reach 127\.0\.0\.1"):
        operator.execute(context_of(operator))
